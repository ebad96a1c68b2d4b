//! The `tokenizer.*` keys of a GGUF.

use std::{collections::BTreeMap, path::Path};

use tokenizers::AddedToken;

use super::data::{Keys, Token, TokenKind, TokenizerData, shorten};
use crate::{
    checkpoint::gguf::Value,
    error::{Error, Result},
};

/// Keys and values of a GGUF.
pub type Metadata = BTreeMap<String, Value>;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const EOG: &str = "tokenizer.ggml.eog_token_ids";
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// ggml's token types; 2 (unknown) and 6 (byte) do not occur in byte-level BPE.
const KINDS: [(u64, TokenKind); 4] =
    [(1, TokenKind::Normal), (3, TokenKind::Control), (4, TokenKind::UserDefined), (5, TokenKind::Unused)];

/// What `metadata` of `file` says.
pub(super) fn read(file: &Path, metadata: &Metadata) -> Result<TokenizerData> {
    if !metadata.keys().any(|key| key.starts_with("tokenizer.")) {
        let why = format!("{} has no tokenizer keys", file.display());
        return Err(Error::Unavailable { what: "the tokenizer".into(), why });
    }
    let keys = Reader { file, metadata };
    keys.exactly(MODEL, "gpt2")?;
    keys.exactly(PRE, "flint")?;
    let texts = keys.array(TOKENS, "strings")?;
    let types = keys.array(TOKEN_TYPE, "integers")?;
    if texts.len() != types.len() {
        return Err(keys.wrong(
            TOKEN_TYPE,
            format!("{} types, one for each token", texts.len()),
            types.len().to_string(),
        ));
    }
    let mut tokens = Vec::with_capacity(texts.len());
    for (id, (text, kind)) in texts.iter().zip(types).enumerate() {
        tokens.push(keys.token(id, text, kind)?);
    }
    let mut merges = Vec::new();
    for (rank, merge) in keys.array(MERGES, "strings")?.iter().enumerate() {
        let pair = match merge {
            Value::String(text) => text.split_once(' ').filter(|(_, right)| !right.contains(' ')),
            _ => None,
        };
        let Some((left, right)) = pair else {
            let name = format!("{MERGES}[{rank}]");
            return Err(keys.wrong(&name, "a string of two tokens with a space between", merge.describe()));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    let mut ends = Vec::new();
    let eos = metadata.get(EOS).map(|value| keys.id(EOS, value)).transpose()?;
    for key in [EOS, EOT, EOM] {
        if let Some(value) = metadata.get(key) {
            ends.push((key.to_owned(), keys.id(key, value)?));
        }
    }
    if metadata.contains_key(EOG) {
        for (i, value) in keys.array(EOG, "integers")?.iter().enumerate() {
            let key = format!("{EOG}[{i}]");
            let id = keys.id(&key, value)?;
            ends.push((key, id));
        }
    }
    let chat_template = match metadata.get(CHAT_TEMPLATE) {
        Some(value) => Some(keys.string(CHAT_TEMPLATE, value)?.to_owned()),
        None => None,
    };
    TokenizerData {
        file: file.to_path_buf(),
        tokens,
        merges,
        ignore_merges: false,
        eos_token_id: None,
        end_token_ids: Vec::new(),
        chat_template,
    }
    .checked(&Keys { tokens: TOKENS, merges: MERGES })?
    .with_end_tokens(&ends, eos)
}

/// The keys that say what `data` says. Beside the first end token, the role markers that end a turn go into the keys
/// for end of turn and end of message, where readers that know no `eog_token_ids` find them.
pub(super) fn write(data: &TokenizerData) -> Result<Metadata> {
    if data.ignore_merges {
        let found = "true, which GGUF's flint pre-tokenizer cannot say";
        return Err(Error::format(&data.file, "model.ignore_merges", "false", found));
    }
    for token in &data.tokens {
        if let Token::Added(token) = token
            && (token.lstrip || token.rstrip || token.single_word)
        {
            let name = format!("added_tokens {}", shorten(&token.content));
            return Err(Error::format(&data.file, name, "no lstrip, rstrip or single_word, as in GGUF", "one of them"));
        }
    }
    let kind = |token: &Token| KINDS.iter().find(|(_, kind)| *kind == token.kind()).expect("every kind is listed").0;
    let id = |id: u32| Value::Unsigned(u64::from(id));
    let text = |text: &str| Value::String(text.to_owned());
    let mut metadata = Metadata::from([
        (MODEL.to_owned(), text("gpt2")),
        (PRE.to_owned(), text("flint")),
        (TOKENS.to_owned(), Value::Array(data.tokens.iter().map(|token| text(token.text())).collect())),
        (
            TOKEN_TYPE.to_owned(),
            Value::Array(data.tokens.iter().map(|token| Value::Signed(kind(token) as i64)).collect()),
        ),
        (
            MERGES.to_owned(),
            Value::Array(data.merges.iter().map(|(left, right)| Value::String(format!("{left} {right}"))).collect()),
        ),
        (EOG.to_owned(), Value::Array(data.end_token_ids.iter().copied().map(id).collect())),
    ]);
    let named = |name: &str| data.end_token_ids.iter().copied().find(|&id| data.tokens[id as usize].text() == name);
    for (key, end) in [(EOS, data.eos_token_id), (EOT, named("<|user|>")), (EOM, named("<|observation|>"))] {
        if let Some(end) = end {
            metadata.insert(key.to_owned(), id(end));
        }
    }
    if let Some(template) = &data.chat_template {
        metadata.insert(CHAT_TEMPLATE.to_owned(), text(template));
    }
    Ok(metadata)
}

/// Typed access to keys, with errors that name them.
struct Reader<'a> {
    file: &'a Path,
    metadata: &'a Metadata,
}

impl<'a> Reader<'a> {
    fn wrong(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::format(self.file, key, expected, found)
    }

    fn get(&self, key: &str, expected: &str) -> Result<&'a Value> {
        self.metadata.get(key).ok_or_else(|| self.wrong(key, expected, "no such key"))
    }

    fn exactly(&self, key: &str, expected: &str) -> Result<()> {
        match self.get(key, expected)? {
            Value::String(text) if text == expected => Ok(()),
            other => Err(self.wrong(key, expected, other.describe())),
        }
    }

    fn array(&self, key: &str, of: &str) -> Result<&'a [Value]> {
        let expected = format!("an array of {of}");
        match self.get(key, &expected)? {
            Value::Array(values) => Ok(values),
            other => Err(self.wrong(key, expected, other.describe())),
        }
    }

    fn string(&self, key: &str, value: &'a Value) -> Result<&'a str> {
        match value {
            Value::String(text) => Ok(text),
            other => Err(self.wrong(key, "a string", other.describe())),
        }
    }

    fn id(&self, key: &str, value: &Value) -> Result<u32> {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| self.wrong(key, "a token id", value.describe()))
    }

    fn token(&self, id: usize, text: &'a Value, kind: &Value) -> Result<Token> {
        let text = match text {
            Value::String(text) => text.clone(),
            other => return Err(self.wrong(&format!("{TOKENS}[{id}]"), "a string", other.describe())),
        };
        let kind = kind
            .as_u64()
            .and_then(|number| KINDS.iter().find(|(n, _)| *n == number))
            .ok_or_else(|| self.wrong(&format!("{TOKEN_TYPE}[{id}]"), "1, 3, 4 or 5", kind.describe()))?
            .1;
        Ok(match kind {
            TokenKind::Normal => Token::Normal(text),
            TokenKind::Unused => Token::Unused(text),
            TokenKind::Control | TokenKind::UserDefined => {
                Token::Added(AddedToken::from(text, kind == TokenKind::Control).normalized(false))
            }
        })
    }
}
