//! safetensors folders that are wrong in one place each: shards, indexes, and the set of files. Every one is refused
//! quickly, without much memory, by an error that names the place and says what stands there.

mod common;

use std::{fs, path::Path};

use common::{
    config_json,
    hostile::{Counting, assert_refused},
    pattern, shard, shard_header,
};
use flint_rs::checkpoint::{Bytes, Checkpoint, safetensors::read_shard};
use serde_json::json;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const VALID: [(&str, &str, &[usize], usize); 2] = [("a", "BF16", &[2, 3], 12), ("b", "U8", &[5], 5)];

fn folder(files: &[(&str, &[u8])]) -> (TempDir, usize) {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), config_json().to_string()).unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    (dir, files.iter().map(|(_, bytes)| bytes.len()).sum())
}

/// A shard whose only tensor has this description.
fn one(description: &str) -> Vec<u8> {
    shard(&format!("{{\"t\":{description}}}"), &[0; 64])
}

fn described(dtype: &str, shape: &str, offsets: &str) -> Vec<u8> {
    one(&format!("{{\"dtype\":{dtype},\"shape\":{shape},\"data_offsets\":{offsets}}}"))
}

#[test]
fn shards() {
    let length = |len: u64| [&len.to_le_bytes()[..], b"{}"].concat();
    let header = |text: &str| shard(text, &[]);
    let two = |second: &str| {
        let a = r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
        shard(&format!("{{\"a\":{a},{second}}}"), &[0; 8])
    };
    let with_data = |len| shard(&shard_header(&VALID), &pattern(len, 3));
    let deep = format!("{{\"__metadata__\":{}", "[".repeat(100_000));
    let many = format!("[{}1]", "1,".repeat(200_000));
    let cases: Vec<(&str, Vec<u8>, &str, &str)> = vec![
        ("empty", vec![], "header length", "a file of 0 bytes"),
        ("length cut", vec![2, 0, 0, 0, 0, 0, 0], "header length", "a file of 7 bytes"),
        ("length 2^64-1", length(u64::MAX), "header length", "18446744073709551615"),
        ("length 2^64-8", length(u64::MAX - 7), "header length", "18446744073709551608"),
        ("length 2^63", length(1 << 63), "header length", "9223372036854775808"),
        ("length 2^40", length(1 << 40), "header length", "1099511627776"),
        ("length above the limit", length(100_000_001), "header length", "100000001"),
        ("length one too long", length(3), "header length", "3"),
        ("length 0", length(0), "header", "EOF"),
        ("length one too short", length(1), "header", "EOF"),
        ("no JSON", header("GGUF"), "header", "expected value"),
        ("a list", header("[]"), "header", "invalid type: sequence"),
        ("text behind", header("{}}"), "header", "trailing characters"),
        ("nested 100,000 deep", header(&deep), "__metadata__", "EOF"),
        ("name not UTF-8", shard_bytes(b"{\"\xff\":1}"), "header", "unicode"),
        ("lone surrogate in a name", header(r#"{"\ud800":1}"#), "header", "hex escape"),
        ("no description", one("null"), "t", "null"),
        ("a number as description", one("7"), "t", "integer `7`"),
        ("no dtype", one(r#"{"shape":[1],"data_offsets":[0,1]}"#), "t", "missing field `dtype`"),
        ("no shape", one(r#"{"dtype":"U8","data_offsets":[0,1]}"#), "t", "missing field `shape`"),
        ("no offsets", one(r#"{"dtype":"U8","shape":[1]}"#), "t", "missing field `data_offsets`"),
        ("unknown dtype", described("\"F3\"", "[64]", "[0,64]"), "t", "unknown variant `F3`"),
        ("dtype is a number", described("250", "[64]", "[0,64]"), "t", "expected value"),
        ("I64", described("\"I64\"", "[8]", "[0,64]"), "t", "I64"),
        ("F64", described("\"F64\"", "[8]", "[0,64]"), "t", "F64"),
        ("BOOL", described("\"BOOL\"", "[64]", "[0,64]"), "t", "BOOL"),
        ("F8_E5M2", described("\"F8_E5M2\"", "[64]", "[0,64]"), "t", "F8_E5M2"),
        ("F4", described("\"F4\"", "[128]", "[0,64]"), "t", "F4"),
        ("a negative dimension", described("\"U8\"", "[-64]", "[0,64]"), "t", "integer `-64`"),
        ("half a dimension", described("\"U8\"", "[0.5]", "[0,64]"), "t", "floating point `0.5`"),
        ("a dimension of 2^64", described("\"U8\"", "[18446744073709551616]", "[0,64]"), "t", "floating point"),
        ("a dimension of 0", described("\"U8\"", "[64,0]", "[0,0]"), "t", "shape [64, 0]"),
        ("five dimensions", described("\"U8\"", "[1,1,1,1,64]", "[0,64]"), "t", "5 dimensions"),
        ("200,001 dimensions", described("\"U8\"", &many, "[0,64]"), "t", "200001 dimensions"),
        ("2^32 x 2^32", described("\"U8\"", "[4294967296,4294967296]", "[0,64]"), "t", "[4294967296, 4294967296]"),
        ("2^63 halves", described("\"F16\"", "[9223372036854775808]", "[0,64]"), "t", "[9223372036854775808]"),
        ("2^40 bytes", described("\"U8\"", "[1099511627776]", "[0,1099511627776]"), "t", "64 bytes of data"),
        ("more than the shape", described("\"U8\"", "[63]", "[0,64]"), "t", "data_offsets [0, 64]"),
        ("less than the shape", described("\"F32\"", "[17]", "[0,64]"), "t", "data_offsets [0, 64]"),
        ("offsets reversed", described("\"U8\"", "[64]", "[64,0]"), "t", "data_offsets [64, 0]"),
        (
            "offsets 2^64-64",
            described("\"U8\"", "[63]", "[18446744073709551552,18446744073709551615]"),
            "t",
            "[18446744073709551552, ",
        ),
        ("offsets above 2^64", described("\"U8\"", "[64]", "[0,18446744073709551680]"), "t", "floating point"),
        ("a negative offset", described("\"U8\"", "[64]", "[-1,63]"), "t", "integer `-1`"),
        ("one offset", described("\"U8\"", "[64]", "[64]"), "t", "invalid length 1"),
        ("three offsets", described("\"U8\"", "[64]", "[0,64,64]"), "t", "trailing characters"),
        ("a gap before the first", described("\"U8\"", "[63]", "[1,64]"), "t", "data_offsets [1, 64]"),
        ("a gap", two(r#""b":{"dtype":"U8","shape":[3],"data_offsets":[5,8]}"#), "b", "data_offsets [5, 8]"),
        ("overlap", two(r#""b":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}"#), "b", "data_offsets [3, 8]"),
        ("the same bytes", two(r#""b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#), "b", "data_offsets [0, 4]"),
        ("the same name", two(r#""a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}"#), "a", "a second tensor"),
        (
            "the same tensor twice",
            two(r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#),
            "a",
            "a second tensor",
        ),
        ("no data", with_data(0), "a", "0 bytes of data"),
        ("one byte short", with_data(16), "b", "16 bytes of data"),
        ("one byte more", with_data(18), "data", "18 bytes"),
    ];
    for (case, bytes, name, found) in cases {
        let (dir, len) = folder(&[("model.safetensors", &bytes)]);
        assert_refused(case, dir.path(), len, name, found);
    }
}

/// A shard with this header and no data.
fn shard_bytes(header: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header].concat()
}

#[test]
fn shards_cut_anywhere() {
    let whole = shard(&shard_header(&VALID), &pattern(17, 3));
    assert_eq!(read_shard(Path::new("whole"), &Bytes::from(whole.clone())).unwrap().len(), 2);
    for len in 0..whole.len() {
        let error =
            read_shard(Path::new("cut"), &Bytes::from(whole[..len].to_vec())).expect_err("cut file").to_string();
        let place = if len < whole.len() - 17 {
            "header length"
        } else if len < whole.len() - 5 {
            "a"
        } else {
            "b"
        };
        assert!(error.starts_with(&format!("cut: {place}: expected ")), "cut at {len}: {error}");
    }
}

fn index(map: &serde_json::Value) -> Vec<u8> {
    json!({"metadata": {"total_size": 17}, "weight_map": map}).to_string().into_bytes()
}

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

#[test]
fn indexes() {
    let (a, b) = (shard(&shard_header(&VALID[..1]), &[0; 12]), shard(&shard_header(&VALID[1..]), &[0; 5]));
    let both = |text: &[u8]| folder(&[(INDEX, text), (SHARDS[0], &a), (SHARDS[1], &b)]);
    for (case, text, name, found) in [
        ("no JSON", b"weight_map".to_vec(), "file", "expected value"),
        ("a list", b"[]".to_vec(), "file", "a list"),
        ("no map", b"{}".to_vec(), "weight_map", "no such key"),
        ("map is a list", index(&json!([])), "weight_map", "a list"),
        ("shard is a number", index(&json!({"a": 1})), "a", "1"),
        ("shard above the folder", index(&json!({"a": "../a.safetensors"})), "a", "../a.safetensors"),
        ("shard at the root", index(&json!({"a": "/etc/passwd"})), "a", "/etc/passwd"),
        ("shard in a folder", index(&json!({"a": "x/a.safetensors"})), "a", "x/a.safetensors"),
        ("shard is the folder", index(&json!({"a": "."})), "a", "\".\""),
        ("no name", index(&json!({"a": ""})), "a", "\"\""),
        ("no such tensor", index(&json!({"a": SHARDS[0], "z": SHARDS[1]})), "z", "no such tensor"),
        ("tensor elsewhere", index(&json!({"a": SHARDS[1], "b": SHARDS[0]})), "a", SHARDS[0]),
    ] {
        let (dir, len) = both(&text);
        assert_refused(case, dir.path(), len, name, found);
    }
    let (dir, _) = both(&index(&json!({"a": SHARDS[0], "b": "model-00003-of-00002.safetensors"})));
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model-00003-of-00002.safetensors: No such file"), "{error}");
}

#[test]
fn sets_without_an_index() {
    let (a, b) = (shard(&shard_header(&VALID[..1]), &[0; 12]), shard(&shard_header(&VALID[1..]), &[0; 5]));
    let (dir, len) = folder(&[(SHARDS[1], &b)]);
    assert_refused("the first is missing", dir.path(), len, SHARDS[0], "1 of 2 shards");
    let (dir, len) = folder(&[("model-00001-of-00003.safetensors", &a), ("model-00003-of-00003.safetensors", &b)]);
    assert_refused("the second is missing", dir.path(), len, "model-00002-of-00003.safetensors", "2 of 3 shards");
    let (dir, len) = folder(&[("x.safetensors", &a), ("y.safetensors", &a)]);
    assert_refused("a tensor in two shards", dir.path(), len, "a", "x.safetensors");
    let (dir, len) = folder(&[("model-00001-of-99999.safetensors", &a)]);
    assert_refused("99,998 missing", dir.path(), len, "model-00002-of-99999.safetensors", "1 of 99999 shards");
    let (dir, len) = folder(&[("model.safetensors.tmp", &a)]);
    assert_refused("only a remainder", dir.path(), len, "safetensors", "2 other files");
}
