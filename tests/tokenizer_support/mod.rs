//! A small Flint tokenizer, trained in the test with the `tokenizers` library's own trainer.

#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use flint_rs::{Result, tokenizer::TokenizerData};
use serde_json::{Value, json};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerBuilder,
    models::bpe::{BPE, BpeTrainer},
    pre_tokenizers::byte_level::ByteLevel,
};

/// Control tokens of the trained tokenizer.
pub const SPECIAL: &[&str] =
    &["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|user|>x"];

/// User-defined ones.
pub const TAGS: &[&str] = &["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "答案"];

/// The pre-tokenizer as a tokenizer.json states it, written down apart from the crate.
pub fn pre_tokenizer() -> Value {
    let word = |head: &str| format!(r"[^\r\n\p{{L}}\p{{N}}]?{head}(?i:'s|'t|'re|'ve|'m|'ll|'d)?");
    let lower = word(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+");
    let upper = word(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*");
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    json!({"type": "Sequence", "pretokenizers": [
        split(r"\p{N}{1,3}"),
        split("[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+"),
        split(&format!(r"{lower}|{upper}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")),
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]})
}

/// A folder with tokenizer.json and the files beside it.
pub struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    /// Trains a tokenizer of about `vocab_size` tokens on generated text of several scripts.
    pub fn train(vocab_size: usize) -> Self {
        let mut trainer = BpeTrainer::builder()
            .vocab_size(vocab_size)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build();
        let pre_tokenizer: PreTokenizerWrapper = serde_json::from_value(pre_tokenizer()).unwrap();
        let mut tokenizer =
            TokenizerBuilder::<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>::new(
            )
            .with_model(BPE::default())
            .with_normalizer(None)
            .with_pre_tokenizer(Some(pre_tokenizer))
            .with_post_processor(Some(ByteLevel::default().into()))
            .with_decoder(Some(ByteLevel::default().into()))
            .build()
            .unwrap();
        tokenizer.train(&mut trainer, corpus().into_iter()).unwrap();
        tokenizer.add_special_tokens(SPECIAL.iter().map(|name| AddedToken::from(*name, true))).unwrap();
        tokenizer
            .add_tokens(TAGS.iter().map(|name| AddedToken::from(*name, false).normalized(*name == "答案")))
            .unwrap();
        let folder = Self { dir: tempfile::tempdir().unwrap() };
        tokenizer.save(folder.file("tokenizer.json"), false).unwrap();
        folder
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.file(name)).unwrap()).unwrap()
    }

    pub fn write(&self, name: &str, content: &str) {
        fs::write(self.file(name), content).unwrap();
    }

    /// What the folder says, with an empty config.json.
    pub fn data(&self) -> Result<TokenizerData> {
        TokenizerData::from_folder(self.dir.path(), &json!({}))
    }
}

/// Sentences of made-up words over several alphabets, code, numbers and spaces: enough repetition for merges.
fn corpus() -> Vec<String> {
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut next = move |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let alphabets: Vec<Vec<char>> = [
        "etaoinshrdlucmf",
        "ETAOINSHR",
        "оеаинтсрвл",
        "αεοτισνρ",
        "的一是不了人我在有他这中大来上",
        "のにはをたがでてとしアイウスト",
        "가나다라마바사",
        "اليمونت",
        "eé\u{301}aàü",
        "0123456789",
        "(){}[];=+-*/<>!&|.,:'\"_#",
        "😀👍🎉",
    ]
    .iter()
    .map(|letters| letters.chars().collect())
    .collect();
    let words: Vec<String> = (0..600)
        .map(|_| {
            let letters = &alphabets[next(alphabets.len())];
            (0..=next(5)).map(|_| letters[next(letters.len())]).collect()
        })
        .collect();
    let gaps = [" ", " ", " ", "", "  ", "\n", "\n    ", "\t", "\r\n", "'s ", "'LL "];
    (0..1500)
        .map(|_| (0..20).flat_map(|_| [words[next(words.len())].as_str(), gaps[next(gaps.len())]]).collect())
        .collect()
}
