//! Ids to text, one at a time.

use std::ops::Deref;

use super::{TokenKind, Tokenizer};
use crate::error::{Error, Result};

/// Incremental decoding: the pieces joined are [`Tokenizer::decode`] of all ids. Holds back at most three bytes: the
/// start of a UTF-8 sequence that may still become a character. `T` is a reference to the tokenizer, borrowed or shared.
pub struct Decoder<T> {
    tokenizer: T,
    skip_control: bool,
    pending: Vec<u8>,
}

impl<T: Deref<Target = Tokenizer>> Decoder<T> {
    /// Starts with no id seen; control tokens are left out or spelled.
    pub fn new(tokenizer: T, skip_control: bool) -> Self {
        Self { tokenizer, skip_control, pending: Vec::new() }
    }

    /// The text that became certain with `id`; may be empty while a UTF-8 sequence is incomplete. Errors:
    /// [`Error::Value`] for an id outside the vocabulary.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let Some(bytes) = self.tokenizer.token_bytes(id) else {
            let accepted = format!("ids below {}", self.tokenizer.vocab_size());
            return Err(Error::value("token_ids", id.to_string(), accepted));
        };
        if self.skip_control && self.tokenizer.token_kind(id) == Some(TokenKind::Control) {
            return Ok(String::new());
        }
        self.pending.extend_from_slice(bytes);
        let (text, used) = decode_certain(&self.pending);
        self.pending.drain(..used);
        Ok(text)
    }

    /// Ends the text: what was still held back, one U+FFFD if a sequence stayed incomplete.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Text of `bytes` as [`String::from_utf8_lossy`] has it, up to a last sequence that more bytes may complete, and the
/// number of bytes before that sequence.
fn decode_certain(bytes: &[u8]) -> (String, usize) {
    let mut text = String::new();
    let mut used = 0;
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        used += chunk.valid().len();
        let invalid = chunk.invalid();
        // No error length: right so far. Followed by another byte it is wrong all the same.
        let at_end = used + invalid.len() == bytes.len();
        let incomplete = at_end && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
        if !invalid.is_empty() && !incomplete {
            text.push(char::REPLACEMENT_CHARACTER);
            used += invalid.len();
        }
    }
    (text, used)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::decode_certain;

    fn stream<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
        let (mut pending, mut text) = (Vec::new(), String::new());
        for piece in pieces {
            pending.extend_from_slice(piece);
            let (certain, used) = decode_certain(&pending);
            text.push_str(&certain);
            pending.drain(..used);
            assert!(pending.is_empty() || can_become_a_character(&pending), "{pending:x?}");
        }
        text.push_str(&String::from_utf8_lossy(&pending));
        text
    }

    fn can_become_a_character(bytes: &[u8]) -> bool {
        [0x80, 0x90, 0xA0].into_iter().any(|second| {
            (1..4).any(|n| {
                let completed = [bytes, &[second, 0x80, 0x80][..n]].concat();
                std::str::from_utf8(&completed).is_ok_and(|text| text.chars().count() == 1)
            })
        })
    }

    /// Bytes that matter to UTF-8: every kind of lead, continuations, the bounds of the special second bytes.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            Just(b'a'),
            Just(0x80),
            Just(0x8F),
            Just(0x90),
            Just(0x9F),
            Just(0xA0),
            Just(0xBF),
            Just(0xC0),
            Just(0xC2),
            Just(0xE0),
            Just(0xE3),
            Just(0xED),
            Just(0xF0),
            Just(0xF4),
            Just(0xF5),
            any::<u8>()
        ];
        proptest::collection::vec(byte, 0..24)
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_lossy_text(bytes in bytes(), cut in 1usize..5) {
            prop_assert_eq!(stream(bytes.chunks(cut)), String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn an_invalid_byte_is_replaced_at_once() {
        assert_eq!(decode_certain(b"a\xC0"), ("a\u{FFFD}".into(), 2));
        assert_eq!(decode_certain(b"\xE0\x80"), ("\u{FFFD}\u{FFFD}".into(), 2));
        assert_eq!(decode_certain(b"\xF0\x9F\x98"), (String::new(), 0));
        assert_eq!(decode_certain(b"\xF0\x9F\x98\xC3"), ("\u{FFFD}".into(), 3));
        assert_eq!(decode_certain("é😀".as_bytes()), ("é😀".into(), 6));
    }
}
