//! The bytes become the tokenizer keys of a GGUF, and a text. A tokenizer that is built encodes the text to ids of its
//! vocabulary that decode to the text, or refuses it.
#![no_main]

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use flint_rs::{
    checkpoint::{
        Checkpoint,
        gguf::{Gguf, Value},
    },
    tokenizer::{ControlTokens, Tokenizer},
};
use libfuzzer_sys::fuzz_target;

/// Either a sound tokenizer, so that encoding is reached, or keys that are wrong in any way.
#[derive(Arbitrary, Debug)]
enum Keys {
    Sound {
        /// Control (even) and user-defined tokens.
        added: Vec<(String, u8)>,
        /// Merges of the tokens at these places, each of which makes one more token.
        merges: Vec<(u8, u8)>,
        ends: Vec<u8>,
    },
    Any {
        tokens: Vec<String>,
        types: Vec<i8>,
        merges: Vec<String>,
        ends: Vec<i16>,
        eos: i16,
    },
}

#[derive(Arbitrary, Debug)]
struct Input {
    keys: Keys,
    text: String,
    /// Added tokens to put into the text.
    inserted: Vec<u8>,
    ids: Vec<u16>,
}

fuzz_target!(|input: Input| {
    let mut text = input.text;
    let metadata = match input.keys {
        Keys::Any { tokens, types, merges, ends, eos } => {
            let mut metadata =
                metadata(tokens, types.into_iter().map(i64::from), merges, ends.into_iter().map(i64::from));
            metadata.insert("tokenizer.ggml.eos_token_id".into(), Value::Signed(eos.into()));
            metadata
        }
        Keys::Sound { added, merges: pairs, ends } => {
            let mut tokens = byte_characters();
            let mut merges = Vec::new();
            for (left, right) in pairs {
                let parts = tokens.get(usize::from(left)).zip(tokens.get(usize::from(right)));
                let Some((left, right)) = parts else { continue };
                let (merge, merged) = (format!("{left} {right}"), format!("{left}{right}"));
                if !tokens.contains(&merged) {
                    merges.push(merge);
                    tokens.push(merged);
                }
            }
            let mut types = vec![1; tokens.len()];
            for (token, kind) in added {
                if !token.is_empty() && !tokens.contains(&token) {
                    tokens.push(token);
                    types.push(if kind % 2 == 0 { 3 } else { 4 });
                }
            }
            for place in input.inserted {
                text += &tokens[tokens.len() - 1 - usize::from(place) % tokens.len()];
            }
            let ends = ends.into_iter().map(|id| (usize::from(id) % tokens.len()) as i64).collect::<Vec<_>>();
            metadata(tokens, types, merges, ends)
        }
    };
    let checkpoint = Checkpoint::Gguf(Gguf { path: "fuzz.gguf".into(), metadata, tensors: BTreeMap::new() });
    let Ok(tokenizer) = Tokenizer::from_checkpoint(&checkpoint) else { return };
    assert!(tokenizer.end_token_ids().iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
    for control in [ControlTokens::AsText, ControlTokens::Parse] {
        let Ok(ids) = tokenizer.encode(&text, control) else { continue };
        assert_eq!(tokenizer.decode(&ids, false).expect("ids of the vocabulary"), text);
    }
    let ids: Vec<u32> = input.ids.iter().map(|&id| id.into()).collect();
    if let Ok(whole) = tokenizer.decode(&ids, false) {
        let mut decoder = tokenizer.decoder(false);
        let mut pieces = String::new();
        for &id in &ids {
            pieces += &decoder.push(id).expect("decode took the same ids");
        }
        assert_eq!(pieces + &decoder.finish(), whole);
    }
});

fn metadata(
    tokens: Vec<String>,
    types: impl IntoIterator<Item = i64>,
    merges: Vec<String>,
    ends: impl IntoIterator<Item = i64>,
) -> BTreeMap<String, Value> {
    let strings = |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
    BTreeMap::from([
        ("tokenizer.ggml.model".into(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Value::String("flint".into())),
        ("tokenizer.ggml.tokens".into(), strings(tokens)),
        ("tokenizer.ggml.token_type".into(), Value::Array(types.into_iter().map(Value::Signed).collect())),
        ("tokenizer.ggml.merges".into(), strings(merges)),
        ("tokenizer.ggml.eog_token_ids".into(), Value::Array(ends.into_iter().map(Value::Signed).collect())),
    ])
}

/// GPT-2's characters for the 256 bytes: printable Latin-1 stands for itself, the others follow from U+0100 in order.
fn byte_characters() -> Vec<String> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255_u8).filter(|byte| !printable(byte)).count() as u32;
    let themselves = (0..=255_u8).filter(printable).map(char::from);
    themselves.chain((0..others).filter_map(|i| char::from_u32(0x100 + i))).map(String::from).collect()
}
