//! The bytes become the tokenizer keys of a GGUF, and a text. A tokenizer that is built encodes the text to ids of its
//! vocabulary that decode to the text, or refuses it.
#![no_main]

use std::collections::BTreeMap;

use flint_rs::{
    checkpoint::{
        Checkpoint,
        gguf::{Gguf, Value},
    },
    tokenizer::{ControlTokens, Tokenizer},
};
use libfuzzer_sys::{arbitrary::Arbitrary, fuzz_target};

#[derive(Arbitrary, Debug)]
struct Input {
    /// Texts and types of tokens beside the bytes.
    tokens: Vec<(String, u8)>,
    merges: Vec<String>,
    /// Merges made of two of the tokens, which random text would hardly name.
    pairs: Vec<(u8, u8)>,
    /// End ids, by key.
    ends: Vec<(u8, i16)>,
    end_list: Option<Vec<u16>>,
    /// One token for every byte, so that any text can be spelled.
    whole_alphabet: bool,
    more_types: i8,
    chat_template: Option<String>,
    text: String,
    ids: Vec<u16>,
}

fuzz_target!(|input: Input| {
    let tokens = tokens(&input);
    let texts = tokens.iter().map(|(text, _)| Value::String(text.clone())).collect();
    let types = tokens.iter().map(|(_, kind)| Value::Signed((*kind).into())).chain(
        (0..input.more_types.max(0)).map(|_| Value::Signed(1)),
    );
    let at = |i: u8| tokens.get(usize::from(i)).map(|(text, _)| text.as_str());
    let pairs = input.pairs.iter().filter_map(|&(a, b)| Some(format!("{} {}", at(a)?, at(b)?)));
    let merges = input.merges.iter().cloned().chain(pairs).map(Value::String).collect();
    let mut metadata = BTreeMap::from([
        ("tokenizer.ggml.model".to_owned(), Value::String("gpt2".into())),
        ("tokenizer.ggml.pre".to_owned(), Value::String("flint".into())),
        ("tokenizer.ggml.tokens".to_owned(), Value::Array(texts)),
        ("tokenizer.ggml.token_type".to_owned(), Value::Array(types.collect())),
        ("tokenizer.ggml.merges".to_owned(), Value::Array(merges)),
    ]);
    for (key, id) in &input.ends {
        let key = ["eos", "eot", "eom", "bos"][usize::from(key % 4)];
        metadata.insert(format!("tokenizer.ggml.{key}_token_id"), Value::Signed((*id).into()));
    }
    if let Some(list) = &input.end_list {
        let ids = list.iter().map(|&id| Value::Unsigned(id.into())).collect();
        metadata.insert("tokenizer.ggml.eog_token_ids".into(), Value::Array(ids));
    }
    if let Some(template) = &input.chat_template {
        metadata.insert("tokenizer.chat_template".into(), Value::String(template.clone()));
    }
    let checkpoint = Checkpoint::Gguf(Gguf { path: "fuzz.gguf".into(), metadata, tensors: BTreeMap::new() });
    let Ok(tokenizer) = Tokenizer::from_checkpoint(&checkpoint) else { return };
    assert!(tokenizer.end_token_ids().iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
    for control in [ControlTokens::AsText, ControlTokens::Parse] {
        let Ok(ids) = tokenizer.encode(&input.text, control) else { continue };
        assert_eq!(tokenizer.decode(&ids, false).expect("ids of the vocabulary"), input.text);
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

fn tokens(input: &Input) -> Vec<(String, u8)> {
    let own = input.tokens.iter().map(|(text, kind)| (text.clone(), kind % 8));
    if !input.whole_alphabet {
        return own.collect();
    }
    // GPT-2's byte characters: printable Latin-1 stands for itself, the others follow from U+0100 in order.
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255_u8).filter(|byte| !printable(byte)).count() as u32;
    let characters = (0..=255_u8).filter(printable).map(char::from);
    let characters = characters.chain((0..others).filter_map(|i| char::from_u32(0x100 + i)));
    characters.map(|c| (c.to_string(), 1)).chain(own).collect()
}
