//! GGUFs in several files: whole sets, and sets that are wrong in one place each.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
};

use common::{
    GgufFile,
    hostile::{Counting, assert_refused, refusal},
    kind, pattern, string_value, typed, u32_value,
};
use flint_rs::{
    checkpoint::{Bytes, Checkpoint, gguf::Gguf},
    config::FlintConfig,
};
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn numbered(file: GgufFile, number: u16, count: u16, tensors: i32) -> GgufFile {
    file.key("split.no", typed(kind::U16, &number.to_le_bytes()))
        .key("split.count", typed(kind::U16, &count.to_le_bytes()))
        .key("split.tensors.count", typed(kind::I32, &tensors.to_le_bytes()))
}

/// A Flint of three parts as llama.cpp's splitter writes them: keys in the first, two tensors there, then two and one.
fn parts() -> [GgufFile; 3] {
    let tensor = |file: GgufFile, name: &str| file.tensor(name, &[5], 0, &pattern(20, name.len() as u8));
    [
        numbered(GgufFile::flint(), 0, 3, 5),
        tensor(tensor(numbered(GgufFile::empty(), 1, 3, 5), "a"), "bb"),
        tensor(numbered(GgufFile::empty(), 2, 3, 5), "ccc"),
    ]
}

fn name(number: usize) -> String {
    format!("flint-0000{}-of-00003.gguf", number + 1)
}

/// Writes the parts; gives the first one's path and the size of all.
fn write(dir: &Path, parts: &[GgufFile]) -> (PathBuf, usize) {
    let mut len = 0;
    for (number, part) in parts.iter().enumerate() {
        let bytes = part.bytes();
        len += bytes.len();
        fs::write(dir.join(name(number)), bytes).unwrap();
    }
    (dir.join(name(0)), len)
}

#[test]
fn a_set_is_opened_by_its_first_part_or_its_folder() {
    let dir = TempDir::new().unwrap();
    let (first, _) = write(dir.path(), &parts());
    for path in [&first, dir.path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(FlintConfig::from_checkpoint(&checkpoint).unwrap().n_experts, 7);
        let Checkpoint::Gguf(gguf) = checkpoint else { panic!("not a GGUF") };
        let names: Vec<_> = gguf.tensors.keys().map(String::as_str).collect();
        assert_eq!(names, ["a", "bb", "ccc", "output_norm.weight", "token_embd.weight"]);
        assert_eq!(*gguf.tensors["ccc"].data, pattern(20, 3));
        assert_eq!(gguf.tensors["bb"].file.file_name().unwrap().to_str().unwrap(), name(1));
    }
}

#[test]
fn a_split_of_one_is_a_whole_file() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("any name.gguf");
    fs::write(&path, numbered(GgufFile::flint(), 0, 1, 2).bytes()).unwrap();
    let Checkpoint::Gguf(gguf) = Checkpoint::open(&path).unwrap() else { panic!("not a GGUF") };
    assert_eq!(gguf.tensors.len(), 2);
}

#[test]
fn wrong_sets_are_refused() {
    type Change = fn(&mut [GgufFile; 3]);
    let cases: [(&str, Change, &str, &str); 12] = [
        ("count 0", |p| p[0] = numbered(p[0].clone(), 0, 0, 5), "split.count", "0"),
        ("count 65535", |p| p[0] = numbered(p[0].clone(), 0, 65535, 5), "file name", "flint-00001-of-00003.gguf"),
        ("number past the count", |p| p[0] = numbered(p[0].clone(), 3, 3, 5), "split.no", "3"),
        ("count in words", |p| p[0] = p[0].clone().key("split.count", string_value("3")), "split.count", "\"3\""),
        ("no number", |p| p[0] = p[0].clone().without("split.no"), "split.no", "no such key"),
        ("no total", |p| p[0] = p[0].clone().without("split.tensors.count"), "split.tensors.count", "no such key"),
        ("negative total", |p| p[0] = numbered(p[0].clone(), 0, 3, -5), "split.tensors.count", "-5"),
        (
            "wrong total",
            |p| (0..3).for_each(|n| p[n] = numbered(p[n].clone(), n as u16, 3, 6)),
            "split.tensors.count",
            "5 in the 3 parts",
        ),
        ("part of another total", |p| p[1] = numbered(p[1].clone(), 1, 3, 4), "split keys", "with 4 tensors"),
        ("part of another set", |p| p[2] = numbered(p[2].clone(), 2, 4, 5), "split keys", "split.count 4"),
        ("the same part twice", |p| p[2] = p[1].clone(), "split keys", "split.no 1"),
        ("a part without keys", |p| p[1].keys.clear(), "split keys", "no split keys"),
    ];
    for (case, change, key, found) in cases {
        let dir = TempDir::new().unwrap();
        let mut parts = parts();
        change(&mut parts);
        let (first, len) = write(dir.path(), &parts);
        assert_refused(case, &first, len, key, found);
    }
}

#[test]
fn a_tensor_in_two_parts_is_refused() {
    let dir = TempDir::new().unwrap();
    let mut parts = parts();
    parts[2].tensors[0].name = "bb".into();
    let (first, len) = write(dir.path(), &parts);
    assert_refused("twice", &first, len, "bb", &name(1));
}

#[test]
fn a_missing_or_later_part_is_named() {
    let dir = TempDir::new().unwrap();
    let (first, len) = write(dir.path(), &parts());
    assert_refused("later part", &dir.path().join(name(1)), len, "split.no", "part 2");
    let error = Checkpoint::open(&dir.path().join(name(2))).unwrap_err().to_string();
    assert!(error.contains(&name(0)), "{error}");
    fs::remove_file(dir.path().join(name(2))).unwrap();
    let error = Checkpoint::open(&first).unwrap_err().to_string();
    assert!(error.contains(&name(2)) && error.contains("No such file"), "{error}");
    fs::remove_file(&first).unwrap();
    assert_refused("no first part", dir.path(), len, "checkpoint", &format!("{} without the first part", name(1)));
}

#[test]
fn a_damaged_later_part_is_refused_under_its_own_name() {
    let dir = TempDir::new().unwrap();
    let (first, len) = write(dir.path(), &parts());
    let last = dir.path().join(name(2));
    let bytes = fs::read(&last).unwrap();
    fs::write(&last, &bytes[..bytes.len() - 1]).unwrap();
    let error = Checkpoint::open(&first).unwrap_err().to_string();
    assert!(error.contains(&name(2)), "{error}");
    assert!(refusal("short part", &first, len).starts_with("ccc: expected 20 bytes"), "{error}");
}

#[test]
fn bytes_alone_are_no_part() {
    let path = Path::new("memory");
    let error = Gguf::from_bytes(path, &Bytes::from(parts()[0].bytes())).unwrap_err().to_string();
    assert!(error.starts_with("memory: split.count: expected a file that is not split"), "{error}");
    let whole = Gguf::from_bytes(path, &Bytes::from(GgufFile::flint().key("a", u32_value(1)).bytes())).unwrap();
    assert_eq!(whole.tensors.len(), 2);
}
