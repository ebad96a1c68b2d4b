//! What a checkpoint says about its tokenizer, whichever way it says it.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
};

use tokenizers::AddedToken;

use super::{gguf, json};
use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
};

/// Control tokens that end a turn although no key names them: the usual end-of-text and end-of-turn spellings, and the
/// role markers before which a Flint stops.
const END_NAMES: [&str; 12] = [
    "<|endoftext|>",
    "<|user|>",
    "<|observation|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "</s>",
];

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text.
    Normal,
    /// A marker that is no text: turns, tools, ends. Left out when decoding skips control tokens.
    Control,
    /// A piece that is never merged from others, such as a tag; always decoded.
    UserDefined,
    /// An id that nothing encodes to and that decodes to nothing.
    Unused,
}

/// One entry of the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// Bytes spelled in byte-level characters.
    Normal(String),
    /// Literal text, with the rules by which it is found in a text; `special` marks a control token.
    Added(AddedToken),
    /// A name that only fills the place.
    Unused(String),
}

impl Token {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Normal(text) | Self::Unused(text) => text,
            Self::Added(token) => &token.content,
        }
    }

    pub(super) fn kind(&self) -> TokenKind {
        match self {
            Self::Normal(_) => TokenKind::Normal,
            Self::Added(token) if token.special => TokenKind::Control,
            Self::Added(_) => TokenKind::UserDefined,
            Self::Unused(_) => TokenKind::Unused,
        }
    }
}

/// A tokenizer as its checkpoint describes it, checked: tokens are distinct and not empty, merges name ordinary tokens
/// and make ordinary tokens, end ids are inside the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizerData {
    /// For error messages.
    pub(super) file: PathBuf,
    /// By id.
    pub(super) tokens: Vec<Token>,
    /// Earlier ones win.
    pub(super) merges: Vec<(String, String)>,
    /// Takes a piece that is a token as it is, before merging; tokenizer.json only.
    pub(super) ignore_merges: bool,
    /// The one end token that formats with room for one name.
    pub(super) eos_token_id: Option<u32>,
    /// Ascending.
    pub(super) end_token_ids: Vec<u32>,
    pub(super) chat_template: Option<String>,
}

/// How a format calls the parts that [`TokenizerData::checked`] looks at.
pub(super) struct Keys {
    pub(super) tokens: &'static str,
    pub(super) merges: &'static str,
}

impl TokenizerData {
    /// The tokenizer of `checkpoint`. Errors: [`Error::Unavailable`] when it has none, [`Error::Format`] naming the key
    /// that is missing or wrong.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => Self::from_gguf_metadata(&gguf.path, &gguf.metadata),
            Checkpoint::Safetensors(dir) => Self::from_folder(&dir.path, &dir.config),
        }
    }

    /// Of GGUF metadata; `file` is named in errors.
    pub fn from_gguf_metadata(file: &Path, metadata: &gguf::Metadata) -> Result<Self> {
        gguf::read(file, metadata)
    }

    /// Of the tokenizer.json in `folder`, with the end tokens and the chat template that the files beside it and
    /// `config` (config.json) name.
    pub fn from_folder(folder: &Path, config: &serde_json::Value) -> Result<Self> {
        json::read(folder, config)
    }

    /// The `tokenizer.*` keys of a GGUF that says the same. Errors: [`Error::Format`] for what only a tokenizer.json
    /// can say.
    pub fn to_gguf_metadata(&self) -> Result<gguf::Metadata> {
        gguf::write(self)
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// `self` with its end tokens: `named` (key and id) and those that are known by their text. `eos` is the one that the
    /// source calls so; without it, the first that [`END_NAMES`] lists.
    pub(super) fn with_end_tokens(mut self, named: &[(String, u32)], eos: Option<u32>) -> Result<Self> {
        let mut ids = BTreeSet::new();
        for (key, id) in named {
            if *id as usize >= self.tokens.len() {
                let accepted = format!("an id below {}", self.tokens.len());
                return Err(Error::format(&self.file, key, accepted, id.to_string()));
            }
            ids.insert(*id);
        }
        let place = |token: &Token| END_NAMES.iter().position(|name| *name == token.text());
        let controls = (0u32..).zip(&self.tokens).filter(|(_, token)| token.kind() == TokenKind::Control);
        let by_name: Vec<(usize, u32)> = controls.filter_map(|(id, token)| Some((place(token)?, id))).collect();
        ids.extend(by_name.iter().map(|(_, id)| id));
        self.eos_token_id = eos.or_else(|| by_name.iter().min().map(|(_, id)| *id));
        self.end_token_ids = ids.into_iter().collect();
        Ok(self)
    }

    /// `self` if tokens and merges are in order.
    pub(super) fn checked(self, keys: &Keys) -> Result<Self> {
        let wrong =
            |name: String, expected: &str, found: &str| Err(Error::format(&self.file, name, expected, shorten(found)));
        let mut by_text = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            if token.text().is_empty() {
                return wrong(format!("{}[{id}]", keys.tokens), "a token with text", "an empty one");
            }
            if let Some((first, _)) = by_text.insert(token.text(), (id, token.kind())) {
                let expected = format!("a token other than {first}'s");
                return wrong(format!("{}[{id}]", keys.tokens), &expected, token.text());
            }
        }
        let mut joined = String::new();
        for (rank, (left, right)) in self.merges.iter().enumerate() {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            for part in [left, right, &joined] {
                // A merge into a control token would let plain text become one.
                if !matches!(by_text.get(part.as_str()), Some((_, TokenKind::Normal))) {
                    return wrong(format!("{}[{rank}]", keys.merges), "two ordinary tokens that make one", part);
                }
            }
        }
        Ok(self)
    }
}

/// The beginning of `text`, quoted: error messages show it whatever a file's strings hold.
pub(super) fn shorten(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{:?}... ({} bytes)", &text[..end], text.len()),
        None => format!("{text:?}"),
    }
}
