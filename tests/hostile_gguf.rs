//! GGUF files that are wrong in one place each. Every one is refused quickly, without much memory, by an error that names
//! the place and says what stands there.

mod common;

use std::{fs, path::Path};

use common::{
    GgufFile, f32_value,
    hostile::{Counting, assert_refused},
    kind, list_value, string, string_value, strings_value, typed, u32_value,
};
use flint_rs::checkpoint::{Bytes, gguf::Gguf};
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a case is, the file, the name that the error must give and what it must have found.
type Case = (&'static str, Vec<u8>, &'static str, &'static str);

fn check(cases: &[Case]) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("case.gguf");
    for (case, bytes, name, found) in cases {
        fs::write(&path, bytes).unwrap();
        assert_refused(case, &path, bytes.len(), name, found);
    }
}

/// A file whose first key has this name (with its length in front) and this value.
fn first_key(name: &[u8], value: &[u8]) -> Vec<u8> {
    let header = GgufFile { key_count: Some(1), ..GgufFile::empty() }.header();
    [&header, name, value, &[0; 32]].concat()
}

/// A valid Flint with one more key.
fn with(key: &str, value: Vec<u8>) -> Vec<u8> {
    GgufFile::flint().key(key, value).bytes()
}

/// A valid Flint with one more tensor.
fn tensor(name: &str, dims: &[u64], kind: u32, data: &[u8]) -> GgufFile {
    GgufFile::flint().tensor(name, dims, kind, data)
}

fn counts(tensors: u64, keys: u64) -> Vec<u8> {
    GgufFile { tensor_count: Some(tensors), key_count: Some(keys), ..GgufFile::flint() }.bytes()
}

#[test]
fn headers() {
    let flint = GgufFile::flint();
    let (tensors, keys) = (flint.tensors.len() as u64, flint.keys.len() as u64);
    let version = |version| GgufFile { version, ..GgufFile::flint() }.bytes();
    // Counts that start loops over a file with nothing in it.
    let forty_three = |tensors, keys| {
        let header = GgufFile { tensor_count: Some(tensors), key_count: Some(keys), ..GgufFile::empty() }.header();
        [header, vec![0; 19]].concat()
    };
    assert_eq!(forty_three(0, 0).len(), 43);
    check(&[
        ("empty file", vec![], "magic", "0 bytes up to the end"),
        ("magic cut", b"GGU".to_vec(), "magic", "3 bytes up to the end"),
        ("older magic", GgufFile { magic: *b"ggjt", ..GgufFile::flint() }.bytes(), "magic", "\"ggjt\""),
        ("no text in the magic", GgufFile { magic: [0, 255, 10, 34], ..GgufFile::flint() }.bytes(), "magic", r"\xff"),
        ("version cut", b"GGUF\x03\0\0".to_vec(), "version", "3 bytes up to the end"),
        ("version 0", version(0), "version", "0"),
        ("version 1", version(1), "version", "1"),
        ("version 4", version(4), "version", "4"),
        ("version 2^32-1", version(u32::MAX), "version", "4294967295"),
        ("big-endian", version(3_u32.swap_bytes()), "version", "50331648 (big-endian)"),
        ("counts cut", flint.header()[..20].to_vec(), "tensor count", "2"),
        ("tensors 2^64-1", counts(u64::MAX, keys), "tensor count", "18446744073709551615"),
        ("tensors 2^63", counts(1 << 63, keys), "tensor count", "9223372036854775808"),
        ("tensors 2^40", counts(1 << 40, keys), "tensor count", "1099511627776"),
        ("tensors one too many", counts(tensors + 1, keys), "name of tensor 2", "216 bytes up to the end"),
        ("more tensors than any Flint", [counts(65537, keys), vec![0; 4 << 20]].concat(), "tensor count", "65537"),
        ("more keys than any Flint", [counts(tensors, 65537), vec![0; 4 << 20]].concat(), "key count", "65537"),
        ("keys 2^64-1", counts(tensors, u64::MAX), "key count", "18446744073709551615"),
        ("keys 2^40", counts(tensors, 1 << 40), "key count", "1099511627776"),
        ("keys one too many", counts(tensors, keys + 1), "name of tensor 0", "292 bytes up to the end"),
        ("keys one too few", counts(tensors, keys - 1), "flint.expert_weights_scale", "6"),
        ("43 bytes, 2^63-1 tensors", forty_three(i64::MAX as u64, 0), "tensor count", "9223372036854775807"),
        ("43 bytes, 2^61 keys", forty_three(0, 1 << 61), "key count", "2305843009213693952"),
        ("43 bytes, one nameless key", forty_three(0, 1), "name of key 0", "0 bytes"),
        ("43 bytes, no keys and no tensors", forty_three(0, 0), "general.architecture", "no such key"),
    ]);
}

#[test]
fn keys() {
    let name = |len: u64| [&len.to_le_bytes()[..], &[b'a'; 64]].concat();
    let text = |len: u64| typed(kind::STRING, &len.to_le_bytes());
    let long = "k".repeat(65536);
    check(&[
        ("name of 2^63 bytes", first_key(&name(1 << 63), &[]), "name of key 0", "96 bytes up to the end"),
        ("name of 2^63-1 bytes", first_key(&name(i64::MAX as u64), &[]), "name of key 0", "96 bytes"),
        ("name of 2^64-1 bytes", first_key(&name(u64::MAX), &[]), "name of key 0", "96 bytes"),
        ("name one byte longer than the file", first_key(&name(97), &[]), "name of key 0", "96 bytes"),
        ("no name", first_key(&string(""), &u32_value(1)), "name of key 0", "0 bytes"),
        ("name of 64 KiB", first_key(&string(&long), &u32_value(1)), "name of key 0", "65536 bytes"),
        ("name not UTF-8", first_key(b"\x02\0\0\0\0\0\0\0\xc3\x28", &u32_value(1)), "name of key 0", "invalid utf-8"),
        ("value type 13", with("a", typed(13, &[0; 8])), "a", "value type 13"),
        ("value type 2^32-1", with("a", typed(u32::MAX, &[0; 8])), "a", "value type 4294967295"),
        ("string of 2^63 bytes", first_key(&string("a"), &text(1 << 63)), "a", "32 bytes up to the end"),
        ("string of 2^63-1 bytes", first_key(&string("a"), &text(i64::MAX as u64)), "a", "32 bytes"),
        ("string of 2^64-8 bytes", first_key(&string("a"), &text(u64::MAX - 7)), "a", "32 bytes"),
        ("string not UTF-8", with("a", typed(kind::STRING, b"\x01\0\0\0\0\0\0\0\xff")), "a", "invalid utf-8"),
        ("bool 2", with("a", typed(kind::BOOL, &[2])), "a", "2"),
        ("list of lists", with("a", list_value(kind::ARRAY, 1, &u32_value(7))), "a", "a list of lists"),
        ("list of lists, 2^61 deep", with("a", list_value(kind::ARRAY, 1 << 61, &[])), "a", "a list of lists"),
        ("list of type 13", with("a", list_value(13, 1, &[0; 8])), "a", "value type 13"),
        ("empty list of type 250", with("a", list_value(250, 0, &[])), "a", "value type 250"),
        ("2^40 strings", with("a", list_value(kind::STRING, 1 << 40, &[])), "a", "1099511627776"),
        ("2^61 u64", with("a", list_value(kind::U64, 1 << 61, &[])), "a", "2305843009213693952"),
        ("2^63 bytes", with("a", list_value(kind::U8, 1 << 63, &[])), "a", "9223372036854775808"),
        ("2^64-1 bools", with("a", list_value(kind::BOOL, u64::MAX, &[])), "a", "18446744073709551615"),
        (
            "list of a string of 2^63 bytes",
            with("a", list_value(kind::STRING, 1, &(1_u64 << 63).to_le_bytes())),
            "a",
            "bytes up to the end",
        ),
        (
            "list with a string that is no UTF-8",
            with("a", list_value(kind::STRING, 1, b"\x01\0\0\0\0\0\0\0\x80")),
            "a",
            "utf-8",
        ),
        ("list with a bool of 255", with("a", list_value(kind::BOOL, 2, &[1, 255])), "a", "255"),
        (
            "more list elements than any vocabulary",
            with("a", list_value(kind::I8, 1 << 23, &vec![0; 1 << 23])),
            "a",
            "8388608",
        ),
        (
            "the same key twice",
            [
                &GgufFile { key_count: Some(2), ..GgufFile::empty() }.header()[..],
                &string("twice"),
                &u32_value(1),
                &string("twice"),
                &u32_value(1),
            ]
            .concat(),
            "twice",
            "two",
        ),
        ("alignment 0", with("general.alignment", u32_value(0)), "general.alignment", "0"),
        ("alignment 3", with("general.alignment", u32_value(3)), "general.alignment", "3"),
        ("alignment 4", with("general.alignment", u32_value(4)), "general.alignment", "4"),
        ("alignment 24", with("general.alignment", u32_value(24)), "general.alignment", "24"),
        ("alignment 2^30", with("general.alignment", u32_value(1 << 30)), "general.alignment", "1073741824"),
        (
            "alignment -32",
            with("general.alignment", typed(kind::I32, &(-32_i32).to_le_bytes())),
            "general.alignment",
            "-32",
        ),
        ("alignment 32.0", with("general.alignment", f32_value(32.0)), "general.alignment", "32.0"),
        ("alignment in words", with("general.alignment", string_value("32")), "general.alignment", "\"32\""),
    ]);
}

#[test]
fn tensors() {
    let shape = |dims: &[u64]| tensor("t", dims, 0, &[0; 64]).bytes();
    let typed = |number| tensor("t", &[64], number, &[0; 256]).bytes();
    let at = |offset: u64| tensor("t", &[16], 0, &[0; 64]).last(|t| t.offset = offset).bytes();
    let long = "n".repeat(65);
    let mut odd_name = tensor("tt", &[16], 0, &[0; 64]).bytes();
    let place = odd_name.windows(10).position(|w| w == b"\x02\0\0\0\0\0\0\0tt").unwrap();
    odd_name[place + 8] = 0xff;
    check(&[
        ("no name", tensor("", &[16], 0, &[0; 64]).bytes(), "name of tensor 2", "0 bytes"),
        ("name of 65 bytes", tensor(&long, &[16], 0, &[0; 64]).bytes(), "name of tensor 2", "65 bytes"),
        ("name not UTF-8", odd_name, "name of tensor 2", "utf-8"),
        ("the same name twice", tensor("output_norm.weight", &[8], 0, &[0; 32]).bytes(), "output_norm.weight", "two"),
        ("no dimensions", shape(&[]), "t", "0"),
        ("five dimensions", shape(&[1, 1, 1, 1, 16]), "t", "5"),
        ("a dimension of 0", shape(&[16, 0]), "t", "0"),
        ("dimensions 2^63 x 2", shape(&[1 << 63, 2]), "t", "shape [2, 9223372036854775808]"),
        ("dimensions 2^32 x 2^32", shape(&[1 << 32, 1 << 32]), "t", "shape [4294967296, 4294967296]"),
        ("dimensions (2^16)^4", shape(&[1 << 16; 4]), "t", "shape [65536, 65536, 65536, 65536]"),
        ("2^62 singles", shape(&[1 << 62]), "t", "shape [4611686018427387904]"),
        ("2^64-1 singles", shape(&[u64::MAX]), "t", "shape [18446744073709551615]"),
        ("2^40 singles", shape(&[1 << 40]), "t", "288 bytes of data"),
        ("one value more than the file", shape(&[17]), "t", "288 bytes of data"),
        ("half an NVFP4 block", tensor("t", &[32, 4], 40, &[0; 72]).bytes(), "t", "shape [4, 32]"),
        ("an odd Q8_0 row", tensor("t", &[33, 32], 8, &[0; 1122]).bytes(), "t", "shape [32, 33]"),
        ("tensor type 250", typed(250), "t", "tensor type 250"),
        ("tensor type 2, Q4_0", typed(2), "t", "tensor type 2 (Q4_0)"),
        ("tensor type 12, Q4_K", typed(12), "t", "tensor type 12 (Q4_K)"),
        ("tensor type 2^32-1", typed(u32::MAX), "t", "tensor type 4294967295"),
        ("offset not aligned", at(260), "t", "260"),
        ("offset 2^64-32", at(u64::MAX - 31), "t", "bytes of data"),
        ("offset 2^63", at(1 << 63), "t", "bytes of data"),
        ("offset past the end", at(1 << 20), "t", "bytes of data"),
        ("on another tensor", at(0), "token_embd.weight", "an offset of 0, inside t"),
        ("into another tensor", at(160), "t", "an offset of 160, inside token_embd.weight"),
        (
            "around another tensor",
            tensor("t", &[64], 0, &[0; 256]).last(|t| t.offset = 32).bytes(),
            "t",
            "an offset of 32, inside token_embd.weight",
        ),
    ]);
}

#[test]
fn files_cut_anywhere() {
    let flint = GgufFile::flint().key("a", strings_value(&["b"]));
    let (header, whole) = (flint.header().len(), flint.bytes());
    let keys = flint.keys.iter().map(|(name, _)| name.as_str());
    let tensors: Vec<_> = flint.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let in_header: Vec<_> = keys.chain(tensors.iter().copied()).chain(["tensor count", "key count"]).collect();
    for len in 0..whole.len() {
        let error = Gguf::from_bytes(Path::new("cut"), &Bytes::from(whole[..len].to_vec())).expect_err("cut file");
        let text = error.to_string();
        let place = text.strip_prefix("cut: ").and_then(|text| text.split(": expected").next()).unwrap();
        let known = match len {
            0..4 => place == "magic",
            4..8 => place == "version",
            // A count is held against the bytes that are left.
            8..24 => place == "tensor count" || place == "key count",
            _ if len < header => place.starts_with("name of ") || in_header.contains(&place),
            _ => tensors.contains(&place),
        };
        assert!(known, "cut at {len}: {text}");
    }
    let short = whole[..whole.len() - 1].to_vec();
    check(&[("one byte short", short, "output_norm.weight", "223 bytes of data")]);
}
