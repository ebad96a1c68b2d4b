//! Text to ids and back, built from GGUF metadata or a tokenizer.json.

use crate::{checkpoint::Checkpoint, error::Result};

/// What a control token spelled inside a text becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlTokens {
    /// Plain text pieces: for everything that a user or a tool wrote.
    AsText,
    /// The control id: for a template's own text.
    Parse,
}

/// Byte-level BPE over Flint's three-split pre-tokenizer.
pub struct Tokenizer {}

impl Tokenizer {
    /// From the checkpoint's own tokenizer: GGUF metadata, or tokenizer.json beside the safetensors.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let _ = checkpoint;
        unimplemented!()
    }

    /// Ids of `text`.
    pub fn encode(&self, text: &str, control: ControlTokens) -> Result<Vec<u32>> {
        let _ = (text, control);
        unimplemented!()
    }

    /// Text of `ids`; bytes that are no UTF-8 become U+FFFD. Errors: [`crate::Error::Value`] for an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_control: bool) -> Result<String> {
        let _ = (ids, skip_control);
        unimplemented!()
    }

    /// Decodes one id at a time.
    pub fn decoder(&self, skip_control: bool) -> Decoder {
        let _ = skip_control;
        unimplemented!()
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        unimplemented!()
    }

    /// Ids that end a turn, ascending.
    pub fn end_token_ids(&self) -> &[u32] {
        unimplemented!()
    }

    /// The jinja source that renders messages, if the checkpoint has one.
    pub fn chat_template(&self) -> Option<&str> {
        unimplemented!()
    }
}

/// Incremental decoding: the pieces joined are [`Tokenizer::decode`] of all ids.
pub struct Decoder {}

impl Decoder {
    /// The text that became certain with `id`; may be empty while a UTF-8 sequence is incomplete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let _ = id;
        unimplemented!()
    }

    /// What was still held back.
    pub fn finish(&mut self) -> String {
        unimplemented!()
    }
}
