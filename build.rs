//! Compiles every `cuda/*.cu` to a fatbin in `OUT_DIR`, for the feature `cuda`.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
};

/// A100 and RTX 30/40; H100 and H200; B200, GB200 and GB300; RTX 50, RTX PRO 6000 and DGX Spark. A developer who works
/// on one card may name its target alone in the variable. There `80/90` is code as it is written for compute capability
/// 8.0, made for a card of 9.0, which is then taken for one of 8.0: so the ways of older cards are tested on a newer one.
const TARGETS: &str = "80 90a 100f 120f";
const TARGETS_VARIABLE: &str = "FLINT_RS_CUDA_TARGETS";
/// When set, kernels are built for compute-sanitizer's racecheck: see cuda/barrier.cuh.
const RACECHECK_VARIABLE: &str = "FLINT_RS_RACECHECK";

/// Prints the folder of the nvcc that the wheels `nvidia-cuda-nvcc` and companions install, or nothing.
const FIND_WHEEL: &str = "import importlib.util as u, pathlib as p; s = u.find_spec('nvidia'); \
    print(*[n for d in (s.submodule_search_locations if s else ()) for n in p.Path(d).glob('cu13/bin/nvcc')][:1])";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match compile_kernels() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            for line in message.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn compile_kernels() -> Result<(), String> {
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?);
    let nvcc = find_nvcc()?;
    take_cards_for_older()?;
    // The folder as a whole, so that a new file is noticed; headers come from each file's dependency list.
    println!("cargo::rerun-if-changed=cuda");
    let mut sources = Vec::new();
    for entry in fs::read_dir("cuda").map_err(|e| format!("cuda: {e}"))? {
        let path = entry.map_err(|e| format!("cuda: {e}"))?.path();
        if path.extension().is_some_and(|e| e == "cu") {
            sources.push(path);
        }
    }
    let results = thread::scope(|scope| {
        let jobs: Vec<_> = sources.iter().map(|source| scope.spawn(|| compile(&nvcc, source, &out_dir))).collect();
        jobs.into_iter().map(|job| job.join().expect("a compile thread does not panic")).collect::<Vec<_>>()
    });
    let errors: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
}

/// Puts the fatbin of `source` into `out_dir`. Cargo gives each profile and set of features its own `out_dir`, and runs this
/// program anew when any kernel changed; so compiled kernels are kept beside them, and made again only when they changed.
fn compile(nvcc: &Path, source: &Path, out_dir: &Path) -> Result<(), String> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |e: io::Error| format!("{path}: {e}")
    };
    // The target folder, of target/PROFILE/build/PACKAGE/out.
    let kept = out_dir.ancestors().nth(4).ok_or("OUT_DIR lies in a target folder")?.join("cuda");
    fs::create_dir_all(&kept).map_err(io(&kept))?;
    let name = Path::new(source.file_name().ok_or("a source has a name")?).with_extension("fatbin");
    let (fatbin, new) = (kept.join(&name), out_dir.join(&name));
    let depfile = new.with_extension("d");
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "-lineinfo", "-compress-mode=size"]).arg(source);
    // A spill costs more than any tuning gains and shows up nowhere else, so it is an error.
    command.arg("-Xptxas=-warn-spills,-warn-lmem-usage,-Werror");
    if env::var_os(RACECHECK_VARIABLE).is_some() {
        command.arg("-DFLINT_RS_RACECHECK");
    }
    let targets = env::var(TARGETS_VARIABLE).unwrap_or_else(|_| TARGETS.into());
    for target in targets.split_whitespace() {
        let (written_for, card) = target.split_once('/').unwrap_or((target, target));
        command.arg("-gencode").arg(format!("arch=compute_{written_for},code=sm_{card}"));
    }
    let stamp = fatbin.with_extension("command");
    let line = format!("{command:?}");
    let kept_depfile = fatbin.with_extension("d");
    if !(fs::read_to_string(&stamp).is_ok_and(|last| last == line) && is_current(&fatbin, &kept_depfile)) {
        let output = command.args(["-MMD", "-MF"]).arg(&depfile).arg("-o").arg(&new).output().map_err(io(nvcc))?;
        if !output.status.success() {
            let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            return Err(format!("{} failed on {}:\n{stdout}{stderr}", nvcc.display(), source.display()));
        }
        // The stamp goes first and comes back last: what it vouches for is whole.
        fs::remove_file(&stamp)
            .or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
            .map_err(io(&stamp))?;
        fs::copy(&depfile, &kept_depfile).map_err(io(&kept_depfile))?;
        fs::copy(&new, &fatbin).map_err(io(&fatbin))?;
        fs::write(&stamp, line).map_err(io(&stamp))?;
    }
    fs::copy(&fatbin, &new).map_err(io(&new))?;
    for file in dependencies(&kept_depfile).map_err(io(&kept_depfile))? {
        println!("cargo::rerun-if-changed={file}");
    }
    Ok(())
}

/// Tells `gpu::Device` the compute capability that all code is written for, when the variable asks for another than the card's.
fn take_cards_for_older() -> Result<(), String> {
    let targets = env::var(TARGETS_VARIABLE).unwrap_or_default();
    if !targets.contains('/') {
        return Ok(());
    }
    match targets.split_once('/') {
        Some((digits, card)) if digits.parse::<u32>().is_ok_and(|n| n >= 80) && !card.contains(['/', ' ']) => {
            let (major, minor) = digits.split_at(digits.len() - 1);
            println!("cargo::rustc-env=FLINT_RS_WRITTEN_FOR={major}.{minor}");
            Ok(())
        }
        _ => {
            Err(format!("{TARGETS_VARIABLE}: expected one target like 80/90 and no other beside it, found {targets:?}"))
        }
    }
}

/// The files that nvcc read, from `target: file file \` in make's syntax.
fn dependencies(depfile: &Path) -> io::Result<Vec<String>> {
    let text = fs::read_to_string(depfile)?;
    let files = text.split_once(": ").map_or("", |(_, files)| files);
    Ok(files.split_whitespace().filter(|&word| word != "\\").map(Into::into).collect())
}

/// Whether `fatbin` is newer than everything it was made from.
fn is_current(fatbin: &Path, depfile: &Path) -> bool {
    let modified = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    let Some(made) = modified(fatbin) else { return false };
    dependencies(depfile).is_ok_and(|files| {
        !files.is_empty() && files.iter().all(|file| modified(Path::new(file)).is_some_and(|changed| changed < made))
    })
}

/// An explicit variable, `CUDA_HOME`, `PATH`, then the wheels in the building interpreter.
fn find_nvcc() -> Result<PathBuf, String> {
    for variable in ["FLINT_RS_NVCC", "CUDA_HOME", "PATH", "PYO3_PYTHON", TARGETS_VARIABLE, RACECHECK_VARIABLE] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    // A variable that points nowhere is an error: falling through would build with another compiler than the one asked for.
    for (variable, below) in [("FLINT_RS_NVCC", ""), ("CUDA_HOME", "bin/nvcc")] {
        if let Some(value) = env::var_os(variable).filter(|value| !value.is_empty()) {
            let nvcc = if below.is_empty() { PathBuf::from(value) } else { Path::new(&value).join(below) };
            return if nvcc.is_file() { Ok(nvcc) } else { Err(format!("{variable}: no file {}", nvcc.display())) };
        }
    }
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(nvcc) = env::split_paths(&path).map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file()) {
        return Ok(nvcc);
    }
    for python in env::var_os("PYO3_PYTHON").into_iter().chain(["python3".into()]) {
        if let Ok(output) = Command::new(python).args(["-c", FIND_WHEEL]).output() {
            let nvcc = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
            if nvcc.is_file() {
                return Ok(nvcc);
            }
        }
    }
    Err("nvcc was not found. Give one of: FLINT_RS_NVCC (the compiler), CUDA_HOME (a toolkit's folder), nvcc on PATH, \
         or the wheels nvidia-cuda-nvcc, -crt, -runtime, -cccl and nvidia-nvvm ==13.0.* in PYO3_PYTHON, else python3 \
         (`make build-env` installs them). Or build for the CPU alone with --no-default-features."
        .into())
}
