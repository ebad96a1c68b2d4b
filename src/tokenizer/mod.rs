//! Text to ids and back, built from GGUF metadata or a tokenizer.json.
//!
//! [`TokenizerData`] is what both sources say, checked; [`Tokenizer`] runs it: the `tokenizers` crate's byte-level BPE
//! behind Flint's pre-tokenizer, and decoding that is our own because it works on bytes, one id at a time.

mod data;
mod decoder;
mod gguf;
mod json;

use tokenizers::{
    AddedVocabulary, Model, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior,
    models::{
        bpe::{BPE, Vocab},
        wordlevel::WordLevel,
    },
    normalizers::NormalizerWrapper,
    pre_tokenizers::{
        PreTokenizerWrapper,
        byte_level::ByteLevel,
        split::{Split, SplitPattern},
    },
};

use self::data::Token;
pub use self::{
    data::{TokenKind, TokenizerData},
    decoder::Decoder,
};
use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
};

/// Applied in this order, each to the pieces that the ones before left; every match becomes a piece of its own.
const SPLITS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];

/// What a control token spelled inside a text becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlTokens {
    /// Plain text pieces: for everything that a user or a tool wrote.
    AsText,
    /// The control id: for a template's own text.
    Parse,
}

/// Byte-level BPE over Flint's three-split pre-tokenizer.
pub struct Tokenizer {
    /// Knows the ordinary tokens only, so that no text can be merged into a control or user-defined one.
    bpe: BPE,
    /// Text to byte-level pieces.
    steps: Vec<PreTokenizerWrapper>,
    /// The control and user-defined tokens and how they are found in text.
    added: AddedVocabulary,
    kinds: Vec<TokenKind>,
    /// What each id decodes to, one after the other; id i ends at `ends[i]`.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// By byte: whether an ordinary token stands for it alone. BPE drops the others without a word.
    encodable: [bool; 256],
    end_token_ids: Vec<u32>,
    chat_template: Option<String>,
}

impl Tokenizer {
    /// From the checkpoint's own tokenizer: GGUF metadata, or tokenizer.json beside the safetensors. Errors:
    /// [`Error::Unavailable`] when the checkpoint has none.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        Self::new(TokenizerData::from_checkpoint(checkpoint)?)
    }

    /// Runs `data`.
    pub fn new(data: TokenizerData) -> Result<Self> {
        let broken = |what: &str, error: tokenizers::Error| {
            Error::format(&data.file, what, "what the tokenizers library accepts", error.to_string())
        };
        let alphabet = ByteAlphabet::new();
        let mut vocab = Vocab::with_capacity(data.tokens.len());
        let mut added = Vec::new();
        let mut kinds = Vec::with_capacity(data.tokens.len());
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(data.tokens.len());
        for (id, token) in (0u32..).zip(data.tokens) {
            kinds.push(token.kind());
            match token {
                Token::Normal(text) => {
                    alphabet.decode(&text, &mut bytes);
                    vocab.insert(text, id);
                }
                Token::Added(token) => {
                    bytes.extend_from_slice(token.content.as_bytes());
                    added.push((token, id));
                }
                Token::Unused(_) => {}
            }
            ends.push(bytes.len());
        }
        let encodable = alphabet.chars.map(|c| vocab.contains_key(c.encode_utf8(&mut [0; 4]) as &str));
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, data.merges)
            .ignore_merges(data.ignore_merges)
            .build()
            .map_err(|e| broken("merges", e))?;
        // The library takes the ids of added tokens from a model; BPE does not know them, so this one names them.
        let ids = WordLevel::builder()
            .vocab(added.iter().map(|(token, id)| (token.content.clone(), *id)).collect())
            .build()
            .map_err(|e| broken("added tokens", e))?;
        let mut vocabulary = AddedVocabulary::new();
        vocabulary
            .add_tokens(added.into_iter().map(|(token, _)| token), &ids, None::<&NormalizerWrapper>)
            .map_err(|e| broken("added tokens", e))?;
        Ok(Self {
            bpe,
            steps: pre_tokenizer(),
            added: vocabulary,
            kinds,
            bytes,
            ends,
            encodable,
            end_token_ids: data.end_token_ids,
            chat_template: data.chat_template,
        })
    }

    /// Ids of `text`. Errors: [`Error::Value`] for a byte of `text` that no token of this vocabulary can spell.
    pub fn encode(&self, text: &str, control: ControlTokens) -> Result<Vec<u32>> {
        if let Some(byte) = text.bytes().find(|&b| !self.encodable[usize::from(b)]) {
            return Err(Error::value("text", format!("byte {byte:#04x}"), "bytes that the vocabulary has a token for"));
        }
        let mut pieces = match control {
            ControlTokens::AsText => PreTokenizedString::from(text),
            ControlTokens::Parse => self.added.extract_and_normalize(None::<&NormalizerWrapper>, text),
        };
        let failed = |error: tokenizers::Error| Error::value("text", error.to_string(), "text that can be split");
        for step in &self.steps {
            step.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        pieces.tokenize(|piece| self.bpe.tokenize(piece.get())).map_err(failed)?;
        let encoding = pieces.into_encoding(None, 0, tokenizers::OffsetType::None).map_err(failed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids`; bytes that are no UTF-8 become U+FFFD. Errors: [`Error::Value`] for an id outside the vocabulary.
    pub fn decode(&self, ids: &[u32], skip_control: bool) -> Result<String> {
        let mut decoder = self.decoder(skip_control);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&decoder.push(id)?);
        }
        text.push_str(&decoder.finish());
        Ok(text)
    }

    /// Decodes one id at a time; leaves control tokens out if `skip_control`, else spells them. User-defined tokens
    /// are always spelled.
    pub fn decoder(&self, skip_control: bool) -> Decoder<&Self> {
        Decoder::new(self, skip_control)
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        self.kinds.len()
    }

    /// What `id` is; `None` outside the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// What `id` decodes to: part of a UTF-8 sequence, one or several; empty for unused ids. `None` outside the
    /// vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let end = *self.ends.get(id)?;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        Some(&self.bytes[start..end])
    }

    /// Whether `id` is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.token_kind(id) == Some(TokenKind::Control)
    }

    /// The id of the control or user-defined token spelled `name`, such as `<think>`.
    pub fn control_id(&self, name: &str) -> Option<u32> {
        self.added.get_vocab().get(name).copied()
    }

    /// Ids that end a turn, ascending.
    pub fn end_token_ids(&self) -> &[u32] {
        &self.end_token_ids
    }

    /// The jinja source that renders messages, if the checkpoint has one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }
}

/// Flint's pre-tokenizer: the three [`SPLITS`], then bytes spelled as characters.
fn pre_tokenizer() -> Vec<PreTokenizerWrapper> {
    let split = |pattern: &str| {
        Split::new(SplitPattern::Regex(pattern.to_owned()), SplitDelimiterBehavior::Isolated, false)
            .expect("the patterns are constants that compile")
            .into()
    };
    let mut steps: Vec<PreTokenizerWrapper> = SPLITS.iter().copied().map(split).collect();
    steps.push(ByteLevel::new(false, true, false).into());
    steps
}

/// How byte-level BPE spells bytes as characters: printable ones of Latin-1 as themselves, the others, in order, from
/// U+0100 on (GPT-2's `bytes_to_unicode`).
struct ByteAlphabet {
    /// By byte.
    chars: [char; 256],
    /// By character; the last one is U+0143.
    bytes: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    fn new() -> Self {
        let mut alphabet = Self { chars: ['\0'; 256], bytes: [None; 0x144] };
        let mut others = '\u{100}'..;
        for byte in 0..=255u8 {
            let char = match byte {
                b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
                _ => others.next().expect("there are 68 of them"),
            };
            alphabet.chars[usize::from(byte)] = char;
            alphabet.bytes[char as usize] = Some(byte);
        }
        alphabet
    }

    /// Appends the bytes that `token` spells; a token with other characters stands for itself, as in the library.
    fn decode(&self, token: &str, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        for char in token.chars() {
            if let Some(Some(byte)) = self.bytes.get(char as usize) {
                bytes.push(*byte);
            } else {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_the_librarys() {
        let alphabet = ByteAlphabet::new();
        assert_eq!(alphabet.chars.iter().copied().collect::<std::collections::HashSet<_>>().len(), 256);
        for char in ByteLevel::alphabet() {
            assert!(alphabet.chars.contains(&char), "{char:?}");
        }
        for (byte, spelled) in [(b' ', 'Ġ'), (b'\n', 'Ċ'), (0xAD, '\u{143}'), (b'a', 'a'), (0xE4, 'ä')] {
            assert_eq!(alphabet.chars[usize::from(byte)], spelled);
            let mut bytes = Vec::new();
            alphabet.decode(&spelled.to_string(), &mut bytes);
            assert_eq!(bytes, [byte]);
        }
    }

    #[test]
    fn a_token_with_foreign_characters_stands_for_itself() {
        let mut bytes = b"x".to_vec();
        ByteAlphabet::new().decode("aĠ→", &mut bytes);
        assert_eq!(bytes, "xaĠ→".as_bytes());
    }
}
