//! What GGUF metadata and the files of a folder may say about a tokenizer, and what is refused.

mod tokenizer_support;

use std::{path::Path, sync::LazyLock};

use flint_rs::{
    Error, Result,
    checkpoint::gguf::Value,
    tokenizer::{ControlTokens, TokenKind, Tokenizer, TokenizerData},
};
use serde_json::json;
use tokenizer_support::{Folder, SPECIAL, TAGS};

type Metadata = std::collections::BTreeMap<String, Value>;

static FOLDER: LazyLock<Folder> = LazyLock::new(|| Folder::train(400));

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// The metadata of the same tokenizer, written down here from its tokenizer.json.
fn metadata() -> Metadata {
    let json = FOLDER.json("tokenizer.json");
    let mut tokens: Vec<(u64, String, i64)> = Vec::new();
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        tokens.push((id.as_u64().unwrap(), token.clone(), 1));
    }
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap();
        tokens.retain(|token| token.0 != id);
        let kind = if added["special"].as_bool().unwrap() { 3 } else { 4 };
        tokens.push((id, added["content"].as_str().unwrap().to_owned(), kind));
    }
    tokens.sort();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    let merges = merges.map(|pair| text(&format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())));
    Metadata::from(
        [
            ("general.architecture", text("flint")),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("flint")),
            ("tokenizer.ggml.tokens", Value::Array(tokens.iter().map(|(_, token, _)| text(token)).collect())),
            ("tokenizer.ggml.token_type", Value::Array(tokens.iter().map(|t| Value::Signed(t.2)).collect())),
            ("tokenizer.ggml.merges", Value::Array(merges.collect())),
        ]
        .map(|(key, value)| (key.to_owned(), value)),
    )
}

fn read(metadata: &Metadata) -> Result<TokenizerData> {
    TokenizerData::from_gguf_metadata(Path::new("test.gguf"), metadata)
}

fn open(metadata: &Metadata) -> Tokenizer {
    Tokenizer::new(read(metadata).unwrap()).unwrap()
}

/// The part that a format error names.
fn named<T>(result: Result<T>) -> String {
    match result.err().expect("an error") {
        Error::Format { name, .. } => name,
        other => panic!("{other:?}"),
    }
}

#[test]
fn gguf_metadata_says_what_tokenizer_json_says() {
    let written = FOLDER.data().unwrap().to_gguf_metadata().unwrap();
    for (key, value) in metadata() {
        if key != "general.architecture" {
            assert!(written[&key] == value, "{key}");
        }
    }
    assert!(read(&written).unwrap().to_gguf_metadata().unwrap() == written);
    let (ours, theirs) = (open(&metadata()), Tokenizer::new(FOLDER.data().unwrap()).unwrap());
    assert_eq!(ours.vocab_size(), theirs.vocab_size());
    for id in 0..u32::try_from(ours.vocab_size()).unwrap() {
        assert_eq!(ours.token_bytes(id), theirs.token_bytes(id));
        assert_eq!(ours.token_kind(id), theirs.token_kind(id));
    }
    assert_eq!(ours.end_token_ids(), theirs.end_token_ids());
}

#[test]
fn end_tokens_come_from_keys_and_from_names() {
    let mut metadata = metadata();
    let by_name = ["<|endoftext|>", "<|user|>", "<|observation|>"];
    let tokenizer = open(&metadata);
    let ids = |names: &[&str], more: &[u32]| {
        let mut ids: Vec<u32> =
            names.iter().map(|name| tokenizer.control_id(name).unwrap()).chain(more.iter().copied()).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(open(&metadata).end_token_ids(), ids(&by_name, &[]));
    metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::Unsigned(5));
    metadata.insert("tokenizer.ggml.eot_token_id".into(), Value::Signed(7));
    metadata.insert("tokenizer.ggml.eom_token_id".into(), Value::Unsigned(5));
    let more = Value::Array(vec![Value::Unsigned(9), Value::Signed(3)]);
    metadata.insert("tokenizer.ggml.eog_token_ids".into(), more);
    assert_eq!(open(&metadata).end_token_ids(), ids(&by_name, &[3, 5, 7, 9]));
    let written = read(&metadata).unwrap().to_gguf_metadata().unwrap();
    assert_eq!(written["tokenizer.ggml.eos_token_id"], Value::Unsigned(5));
    assert_eq!(written["tokenizer.ggml.eot_token_id"], Value::Unsigned(u64::from(ids(&["<|user|>"], &[])[0])));
    assert_eq!(open(&written).end_token_ids(), open(&metadata).end_token_ids());

    // A tag that only looks like an end is none, and neither is a plain token.
    let Some(Value::Array(types)) = metadata.get_mut("tokenizer.ggml.token_type") else { panic!() };
    for name in by_name {
        types[ids(&[name], &[])[0] as usize] = Value::Signed(4);
    }
    assert_eq!(open(&metadata).end_token_ids(), [3, 5, 7, 9]);
}

#[test]
fn unused_ids_are_never_encoded_and_decode_to_nothing() {
    let mut metadata = metadata();
    for (key, value) in [("tokenizer.ggml.tokens", text("[PAD0]")), ("tokenizer.ggml.token_type", Value::Signed(5))] {
        let Some(Value::Array(values)) = metadata.get_mut(key) else { panic!() };
        values.push(value);
    }
    let tokenizer = open(&metadata);
    let id = u32::try_from(tokenizer.vocab_size() - 1).unwrap();
    assert_eq!((tokenizer.token_kind(id), tokenizer.token_bytes(id)), (Some(TokenKind::Unused), Some(&[][..])));
    assert!(!tokenizer.encode("[PAD0]", ControlTokens::Parse).unwrap().contains(&id));
    let a = tokenizer.encode("a", ControlTokens::AsText).unwrap()[0];
    assert_eq!(tokenizer.decode(&[a, id, a], false).unwrap(), "aa");
}

#[test]
fn ids_outside_the_vocabulary_are_refused() {
    let tokenizer = open(&metadata());
    let end = u32::try_from(tokenizer.vocab_size()).unwrap();
    for id in [end, u32::MAX] {
        assert!(matches!(tokenizer.decode(&[0, id], false), Err(Error::Value { field, .. }) if field == "token_ids"));
        assert_eq!((tokenizer.token_bytes(id), tokenizer.token_kind(id)), (None, None));
        assert!(!tokenizer.is_control(id));
    }
    assert_eq!(tokenizer.control_id("a"), None);
}

#[test]
fn text_that_the_vocabulary_cannot_spell_is_refused() {
    let mut metadata = metadata();
    let Some(Value::Array(tokens)) = metadata.get_mut("tokenizer.ggml.tokens") else { panic!() };
    let z = tokens.iter().position(|token| *token == text("z")).unwrap();
    tokens[z] = text("zzz");
    let Some(Value::Array(merges)) = metadata.get_mut("tokenizer.ggml.merges") else { panic!() };
    merges.retain(|merge| !matches!(merge, Value::String(merge) if merge.contains('z')));
    let tokenizer = open(&metadata);
    assert!(tokenizer.encode("abc", ControlTokens::AsText).is_ok());
    for control in [ControlTokens::AsText, ControlTokens::Parse] {
        let error = tokenizer.encode("a z b", control).unwrap_err().to_string();
        assert_eq!(error, "text: expected bytes that the vocabulary has a token for, found byte 0x7a");
    }
}

type Change = fn(&mut Metadata);

#[test]
fn wrong_metadata_is_refused_by_key() {
    fn set(metadata: &mut Metadata, key: &str, value: Value) {
        metadata.insert(key.to_owned(), value);
    }
    fn array<'a>(metadata: &'a mut Metadata, key: &str) -> &'a mut Vec<Value> {
        match metadata.get_mut(&format!("tokenizer.ggml.{key}")) {
            Some(Value::Array(values)) => values,
            other => panic!("{other:?}"),
        }
    }
    let cases: &[(&str, Change)] = &[
        ("tokenizer.ggml.model", |m| _ = m.remove("tokenizer.ggml.model")),
        ("tokenizer.ggml.model", |m| set(m, "tokenizer.ggml.model", text("llama"))),
        ("tokenizer.ggml.model", |m| set(m, "tokenizer.ggml.model", Value::Unsigned(2))),
        ("tokenizer.ggml.pre", |m| _ = m.remove("tokenizer.ggml.pre")),
        ("tokenizer.ggml.pre", |m| set(m, "tokenizer.ggml.pre", text("gpt-2"))),
        ("tokenizer.ggml.tokens", |m| _ = m.remove("tokenizer.ggml.tokens")),
        ("tokenizer.ggml.tokens", |m| set(m, "tokenizer.ggml.tokens", text("a b"))),
        ("tokenizer.ggml.tokens[3]", |m| array(m, "tokens")[3] = Value::Unsigned(3)),
        ("tokenizer.ggml.tokens[3]", |m| array(m, "tokens")[3] = text("")),
        ("tokenizer.ggml.tokens[9]", |m| array(m, "tokens")[9] = text("!")),
        ("tokenizer.ggml.token_type", |m| _ = m.remove("tokenizer.ggml.token_type")),
        ("tokenizer.ggml.token_type", |m| set(m, "tokenizer.ggml.token_type", Value::Bool(true))),
        ("tokenizer.ggml.token_type", |m| _ = array(m, "token_type").pop()),
        ("tokenizer.ggml.token_type", |m| _ = array(m, "tokens").pop()),
        ("tokenizer.ggml.token_type[4]", |m| array(m, "token_type")[4] = Value::Signed(0)),
        ("tokenizer.ggml.token_type[4]", |m| array(m, "token_type")[4] = Value::Signed(-1)),
        ("tokenizer.ggml.token_type[4]", |m| array(m, "token_type")[4] = Value::Signed(6)),
        ("tokenizer.ggml.token_type[4]", |m| array(m, "token_type")[4] = Value::Float(1.0)),
        ("tokenizer.ggml.merges", |m| _ = m.remove("tokenizer.ggml.merges")),
        ("tokenizer.ggml.merges", |m| set(m, "tokenizer.ggml.merges", Value::Float(0.5))),
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = Value::Bool(false)),
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = text("ab")),
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = text("a b c")),
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = text("a ")),
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = text("")),
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = text("a nonsense")),
        // Both are tokens, but what they make is not.
        ("tokenizer.ggml.merges[1]", |m| array(m, "merges")[1] = text("~ ~")),
        ("tokenizer.ggml.eos_token_id", |m| set(m, "tokenizer.ggml.eos_token_id", Value::Unsigned(1 << 40))),
        ("tokenizer.ggml.eot_token_id", |m| set(m, "tokenizer.ggml.eot_token_id", Value::Signed(-1))),
        ("tokenizer.ggml.eom_token_id", |m| set(m, "tokenizer.ggml.eom_token_id", Value::Unsigned(100_000))),
        ("tokenizer.ggml.eog_token_ids", |m| set(m, "tokenizer.ggml.eog_token_ids", Value::Unsigned(1))),
        ("tokenizer.ggml.eog_token_ids[1]", |m| {
            set(m, "tokenizer.ggml.eog_token_ids", Value::Array(vec![Value::Unsigned(1), text("2")]));
        }),
        ("tokenizer.chat_template", |m| set(m, "tokenizer.chat_template", Value::Array(vec![]))),
    ];
    for (name, change) in cases {
        let mut metadata = metadata();
        change(&mut metadata);
        assert_eq!(named(read(&metadata)), *name);
    }
    // A merge that would make a control token out of plain text.
    let mut hostile = metadata();
    let Some(Value::Array(tokens)) = hostile.get_mut("tokenizer.ggml.tokens") else { panic!() };
    let user = tokens.iter().position(|token| *token == text("<|user|>")).unwrap();
    tokens[user] = text("qq");
    array(&mut hostile, "merges")[2] = text("q q");
    assert_eq!(named(read(&hostile)), "tokenizer.ggml.merges[2]");

    let bare = Metadata::from([("general.architecture".to_owned(), text("flint"))]);
    assert!(matches!(read(&bare), Err(Error::Unavailable { .. })));
}

/// Left to itself, BPE would give the control id for the one character that spells it.
#[test]
fn a_control_token_of_one_character_does_not_come_from_plain_text() {
    let mut metadata = metadata();
    let Value::Array(tokens) = &metadata["tokenizer.ggml.tokens"] else { panic!() };
    let q = tokens.iter().position(|token| *token == text("q")).unwrap();
    let Some(Value::Array(types)) = metadata.get_mut("tokenizer.ggml.token_type") else { panic!() };
    types[q] = Value::Signed(3);
    let Some(Value::Array(merges)) = metadata.get_mut("tokenizer.ggml.merges") else { panic!() };
    merges.retain(|merge| !matches!(merge, Value::String(merge) if merge.contains('q')));
    let tokenizer = open(&metadata);
    assert!(tokenizer.encode("a q", ControlTokens::AsText).is_err());
    assert_eq!(tokenizer.control_id("q"), Some(u32::try_from(q).unwrap()));
}

#[test]
fn the_files_beside_tokenizer_json_give_end_tokens_and_template() {
    let folder = Folder::train(300);
    let open = |config: serde_json::Value| TokenizerData::from_folder(folder.path(), &config).and_then(Tokenizer::new);
    let by_name = open(json!({})).unwrap().end_token_ids().to_vec();
    let with = |ids: &[u32]| {
        let mut all = [&by_name, ids].concat();
        all.sort_unstable();
        all.dedup();
        all
    };
    assert_eq!(by_name.len(), 3);
    assert_eq!(open(json!({"eos_token_id": null})).unwrap().end_token_ids(), by_name);
    assert_eq!(open(json!({"eos_token_id": 4})).unwrap().end_token_ids(), with(&[4]));
    folder.write("generation_config.json", r#"{"eos_token_id": [6, 5]}"#);
    let both = open(json!({"eos_token_id": [4, 6]})).unwrap();
    assert_eq!(both.end_token_ids(), with(&[4, 5, 6]));
    assert_eq!(both.chat_template(), None);

    folder.write("tokenizer_config.json", r#"{"eos_token": "<sop>", "chat_template": "from the config"}"#);
    let configured = open(json!({})).unwrap();
    let sop = configured.control_id("<sop>").unwrap();
    assert_eq!(configured.end_token_ids(), with(&[5, 6, sop]));
    assert_eq!(configured.chat_template(), Some("from the config"));
    let list = r#"{"eos_token": {"content": "[gMASK]"},
        "chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]}"#;
    folder.write("tokenizer_config.json", list);
    let listed = open(json!({})).unwrap();
    assert_eq!(listed.end_token_ids(), with(&[5, 6, listed.control_id("[gMASK]").unwrap()]));
    assert_eq!(listed.chat_template(), Some("y"));
    folder.write("chat_template.jinja", "from jinja {{ messages }}\n");
    assert_eq!(open(json!({})).unwrap().chat_template(), Some("from jinja {{ messages }}\n"));
    let metadata = TokenizerData::from_folder(folder.path(), &json!({})).unwrap().to_gguf_metadata().unwrap();
    assert_eq!(metadata["tokenizer.chat_template"], text("from jinja {{ messages }}\n"));

    for config in [json!({"eos_token_id": "4"}), json!({"eos_token_id": [1, -1]}), json!({"eos_token_id": 1_000_000})] {
        assert_eq!(named(open(config)), "eos_token_id");
    }
    std::fs::write(folder.file("chat_template.jinja"), b"\xFF").unwrap();
    assert_eq!(named(open(json!({}))), "template");
    std::fs::remove_file(folder.file("chat_template.jinja")).unwrap();
    for (content, name) in [
        (r#"{"eos_token": "no such token"}"#, "eos_token"),
        (r#"{"chat_template": 5}"#, "chat_template"),
        (r#"{"chat_template": [{"name": "tools", "template": "x"}]}"#, "chat_template"),
        ("{", "JSON"),
    ] {
        folder.write("tokenizer_config.json", content);
        assert_eq!(named(open(json!({}))), name);
    }
    std::fs::remove_file(folder.file("tokenizer.json")).unwrap();
    assert!(matches!(open(json!({})), Err(Error::Unavailable { .. })));
}

type JsonChange = fn(&mut serde_json::Value);

#[test]
fn another_tokenizer_json_is_refused_by_part() {
    let original = FOLDER.json("tokenizer.json");
    let folder = Folder::train(300);
    let read = |json: &serde_json::Value| {
        folder.write("tokenizer.json", &json.to_string());
        folder.data()
    };
    let tokens = SPECIAL.len() + TAGS.len();
    let cases: &[(&str, JsonChange)] = &[
        ("JSON", |j| *j = json!([])),
        ("JSON", |j| _ = j.as_object_mut().unwrap().remove("model")),
        ("JSON", |j| j["model"]["vocab"]["a"] = json!(-1)),
        ("JSON", |j| j["model"]["vocab"]["a"] = json!(1u64 << 33)),
        ("JSON", |j| j["model"]["merges"] = json!([["a"]])),
        ("normalizer", |j| j["normalizer"] = json!({"type": "NFC"})),
        ("pre_tokenizer", |j| j["pre_tokenizer"] = json!(null)),
        ("pre_tokenizer", |j| j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\p{N}")),
        ("pre_tokenizer", |j| j["pre_tokenizer"]["pretokenizers"][1]["behavior"] = json!("Removed")),
        ("pre_tokenizer", |j| j["pre_tokenizer"]["pretokenizers"][3]["add_prefix_space"] = json!(true)),
        ("pre_tokenizer", |j| _ = j["pre_tokenizer"]["pretokenizers"].as_array_mut().unwrap().remove(2)),
        ("model.type", |j| j["model"]["type"] = json!("WordPiece")),
        ("model.dropout", |j| j["model"]["dropout"] = json!(0.1)),
        ("model.continuing_subword_prefix", |j| j["model"]["continuing_subword_prefix"] = json!("##")),
        ("model.end_of_word_suffix", |j| j["model"]["end_of_word_suffix"] = json!("</w>")),
        ("model.vocab", |j| j["model"]["vocab"]["a"] = json!(u32::MAX)),
        ("model.vocab \"b\"", |j| j["model"]["vocab"]["b"] = j["model"]["vocab"]["a"].clone()),
        ("model.merges[0]", |j| j["model"]["merges"] = json!([["a", "nonsense"]])),
        ("model.merges[1]", |j| j["model"]["merges"] = json!(["s t", "abc"])),
        ("added_tokens \"<sop>\"", |j| j["added_tokens"][2]["id"] = json!(3)),
        ("added_tokens \"[gMASK]\"", |j| j["added_tokens"][1]["id"] = j["added_tokens"][0]["id"].clone()),
    ];
    for (name, change) in cases {
        let mut json = original.clone();
        change(&mut json);
        assert_eq!(named(read(&json)), *name);
    }
    // What says the same in other words is accepted: the older form of merges, an empty normalizer, a gap in the ids.
    let mut json = original.clone();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    json["model"]["merges"] =
        merges.map(|pair| json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))).collect();
    json["normalizer"] = json!({"type": "Sequence", "normalizers": []});
    json["pre_tokenizer"]["pretokenizers"][3]["trim_offsets"] = json!(false);
    assert!(read(&json).unwrap().to_gguf_metadata().unwrap() == FOLDER.data().unwrap().to_gguf_metadata().unwrap());
    let last = json["added_tokens"][tokens - 1]["id"].as_u64().unwrap();
    json["added_tokens"][tokens - 1]["id"] = json!(last + 2);
    let gap = Tokenizer::new(read(&json).unwrap()).unwrap();
    assert_eq!(gap.token_kind(last as u32), Some(TokenKind::Unused));
    assert_eq!(gap.control_id(TAGS[TAGS.len() - 1]), Some(last as u32 + 2));

    // GGUF has no words for these.
    json["model"]["ignore_merges"] = json!(true);
    assert_eq!(named(read(&json).unwrap().to_gguf_metadata()), "model.ignore_merges");
    json["model"]["ignore_merges"] = json!(false);
    json["added_tokens"][0]["lstrip"] = json!(true);
    assert_eq!(named(read(&json).unwrap().to_gguf_metadata()), "added_tokens \"<|endoftext|>\"");
}
