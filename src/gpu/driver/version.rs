//! Which driver is installed. The driver's own interface tells only the CUDA version that it serves.

use std::{fs, process::Command};

/// The installed driver's version, such as "580.159.04", from the kernel module or from nvidia-smi.
pub fn installed() -> Option<String> {
    let module = fs::read_to_string("/proc/driver/nvidia/version").ok();
    module.as_deref().and_then(find).or_else(|| {
        let arguments = ["--query-gpu=driver_version", "--format=csv,noheader"];
        let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
        find(&String::from_utf8_lossy(&output.stdout))
    })
}

/// The first word that is numbers with dots between them.
fn find(text: &str) -> Option<String> {
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(|n| n.parse::<u32>().is_ok());
    text.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_where_the_driver_writes_them() {
        for (text, expected) in [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 12.2.0",
                Some("550.54.15"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)",
                Some("580.159.04"),
            ),
            ("580.95.05\n580.95.05\n", Some("580.95.05")),
            ("NVIDIA-SMI has failed. Make sure", None),
            ("", None),
        ] {
            assert_eq!(find(text).as_deref(), expected);
        }
    }
}
