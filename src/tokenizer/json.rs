//! A tokenizer.json and the files beside it in a safetensors folder.

use std::{
    fmt, fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::Value;
use tokenizers::{AddedToken, pre_tokenizers::PreTokenizerWrapper};

use super::data::{Keys, Token, TokenizerData, shorten};
use crate::error::{Error, Result};

/// Ids a tokenizer.json may use: seven times Flint's vocabulary, and small enough for a table of any file's ids.
const MAX_IDS: u32 = 1 << 20;

/// What Flint needs of a tokenizer.json. Padding, truncation, post-processor and decoder are left aside: ids are those
/// of the text alone, and decoding is ours.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    model: BpeJson,
}

#[derive(Deserialize)]
struct AddedEntry {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// The library's `BPE`. Its unknown token and byte fallback never come to use: encoding refuses bytes that have no
/// token before they could.
#[derive(Deserialize)]
struct BpeJson {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Entries,
    merges: Merges,
}

/// The pairs of a JSON object, duplicates included.
struct Entries(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of token ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Entries(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Merges in the present form and the older one, where a space separates the two.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merges {
    Pairs(Vec<(String, String)>),
    Lines(Vec<String>),
}

/// What the files in `folder` say; `config` is its config.json.
pub(super) fn read(folder: &Path, config: &Value) -> Result<TokenizerData> {
    let file = folder.join("tokenizer.json");
    let Some(bytes) = read_if_there(&file)? else {
        let why = format!("{} has no tokenizer.json", folder.display());
        return Err(Error::Unavailable { what: "the tokenizer".into(), why });
    };
    let json: TokenizerJson = parse(&file, &bytes)?;
    check_pipeline(&file, &json)?;
    let ignore_merges = json.model.ignore_merges;
    let merges = merges(&file, json.model.merges)?;
    let tokens = tokens(&file, json.model.vocab, json.added_tokens)?;
    let side = SideFiles::read(folder, config)?;
    let ends = side.end_tokens(&tokens)?;
    TokenizerData {
        file,
        tokens,
        merges,
        ignore_merges,
        eos_token_id: None,
        end_token_ids: Vec::new(),
        chat_template: side.chat_template()?,
    }
    .checked(&Keys { tokens: "model.vocab", merges: "model.merges" })?
    .with_end_tokens(&ends, ends.first().map(|(_, id)| *id))
}

/// Refuses what is not Flint's way from text to pieces; it would give other ids than the model learned.
fn check_pipeline(file: &Path, json: &TokenizerJson) -> Result<()> {
    let wrong = |name: &str, expected: &str, found: String| Err(Error::format(file, name, expected, found));
    match &json.normalizer {
        None => {}
        Some(Value::Object(sequence)) if sequence.get("normalizers") == Some(&Value::Array(Vec::new())) => {}
        Some(other) => return wrong("normalizer", "none", shorten(&other.to_string())),
    }
    let is_flint = match &json.pre_tokenizer {
        Some(PreTokenizerWrapper::Sequence(steps)) => {
            let (steps, flint): (&[PreTokenizerWrapper], _) = (steps.as_ref(), super::pre_tokenizer());
            steps.len() == flint.len()
                && steps.iter().zip(&flint).all(|pair| match pair {
                    // Their other field is about offsets.
                    (PreTokenizerWrapper::ByteLevel(a), PreTokenizerWrapper::ByteLevel(b)) => {
                        a.add_prefix_space == b.add_prefix_space && a.use_regex == b.use_regex
                    }
                    (a, b) => a == b,
                })
        }
        _ => false,
    };
    if !is_flint {
        let found = serde_json::to_string(&json.pre_tokenizer).unwrap_or_else(|e| e.to_string());
        return wrong("pre_tokenizer", "Flint's three splits, then ByteLevel without its own", shorten(&found));
    }
    let model = &json.model;
    if let Some(kind) = model.kind.as_ref().filter(|kind| *kind != "BPE") {
        return wrong("model.type", "BPE", shorten(kind));
    }
    if let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0) {
        return wrong("model.dropout", "none", dropout.to_string());
    }
    for (name, affix) in [
        ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(affix) = affix.as_ref().filter(|affix| !affix.is_empty()) {
            return wrong(name, "none", shorten(affix));
        }
    }
    Ok(())
}

fn merges(file: &Path, merges: Merges) -> Result<Vec<(String, String)>> {
    let lines = match merges {
        Merges::Pairs(pairs) => return Ok(pairs),
        Merges::Lines(lines) => lines,
    };
    let pair = |(rank, line): (usize, &String)| match line.split_once(' ') {
        Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
        _ => {
            let name = format!("model.merges[{rank}]");
            Err(Error::format(file, name, "two tokens with a space between", shorten(line)))
        }
    };
    lines.iter().enumerate().map(pair).collect()
}

/// Tokens by id; ids that the file leaves out are unused.
fn tokens(file: &Path, vocab: Entries, added: Vec<AddedEntry>) -> Result<Vec<Token>> {
    let ids = vocab.0.iter().map(|(_, id)| *id).chain(added.iter().map(|entry| entry.id));
    let len = ids.max().map_or(0, |id| id.saturating_add(1));
    if len > MAX_IDS {
        return Err(Error::format(file, "model.vocab", format!("ids below {MAX_IDS}"), (len - 1).to_string()));
    }
    let mut tokens: Vec<Option<Token>> = vec![None; len as usize];
    for (text, id) in vocab.0 {
        if let Some(first) = &tokens[id as usize] {
            let found = format!("{id} again, which is {}", shorten(first.text()));
            return Err(Error::format(file, format!("model.vocab {}", shorten(&text)), "an id of its own", found));
        }
        tokens[id as usize] = Some(Token::Normal(text));
    }
    for AddedEntry { id, token } in added {
        match &tokens[id as usize] {
            Some(Token::Normal(text)) if *text == token.content => {}
            None => {}
            Some(other) => {
                let name = format!("added_tokens {}", shorten(&token.content));
                return Err(Error::format(
                    file,
                    name,
                    "an id of its own",
                    format!("{id}, which is {}", shorten(other.text())),
                ));
            }
        }
        tokens[id as usize] = Some(Token::Added(token));
    }
    let named = (0..).zip(tokens).map(|(id, token)| token.unwrap_or_else(|| Token::Unused(format!("[PAD{id}]"))));
    Ok(named.collect())
}

/// What stands beside tokenizer.json.
struct SideFiles<'a> {
    folder: &'a Path,
    config: &'a Value,
    generation_config: Value,
    tokenizer_config: Value,
}

impl<'a> SideFiles<'a> {
    fn read(folder: &'a Path, config: &'a Value) -> Result<Self> {
        let object = |name: &str| -> Result<Value> {
            let file = folder.join(name);
            Ok(match read_if_there(&file)? {
                Some(bytes) => parse(&file, &bytes)?,
                None => Value::Null,
            })
        };
        let generation_config = object("generation_config.json")?;
        Ok(Self { folder, config, generation_config, tokenizer_config: object("tokenizer_config.json")? })
    }

    /// Each named end token with the key that names it.
    fn end_tokens(&self, tokens: &[Token]) -> Result<Vec<(String, u32)>> {
        let mut ends = Vec::new();
        for (file, object) in [("config.json", self.config), ("generation_config.json", &self.generation_config)] {
            let value = &object["eos_token_id"];
            let values = match value {
                Value::Null => continue,
                Value::Array(values) => values.as_slice(),
                one => std::slice::from_ref(one),
            };
            for value in values {
                let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
                let Some(id) = id.filter(|id| (*id as usize) < tokens.len()) else {
                    let accepted = format!("token ids below {}", tokens.len());
                    return Err(Error::format(
                        &self.folder.join(file),
                        "eos_token_id",
                        accepted,
                        shorten(&value.to_string()),
                    ));
                };
                ends.push((format!("{file} eos_token_id"), id));
            }
        }
        // A string, or an added token as an object with its content.
        let name = &self.tokenizer_config["eos_token"];
        if let Some(name) = name.as_str().or_else(|| name["content"].as_str()) {
            let Some(id) = (0..).zip(tokens).find(|(_, token)| token.text() == name).map(|(id, _)| id) else {
                return Err(Error::format(
                    &self.tokenizer_config_path(),
                    "eos_token",
                    "a token of the vocabulary",
                    shorten(name),
                ));
            };
            ends.push(("tokenizer_config.json eos_token".into(), id));
        }
        Ok(ends)
    }

    /// `chat_template.jinja`, or the template in `tokenizer_config.json`: one, or a list of named ones with a default.
    fn chat_template(&self) -> Result<Option<String>> {
        let file = self.folder.join("chat_template.jinja");
        if let Some(bytes) = read_if_there(&file)? {
            let text = String::from_utf8(bytes);
            return text.map(Some).map_err(|e| Error::format(&file, "template", "UTF-8", e.utf8_error().to_string()));
        }
        match &self.tokenizer_config["chat_template"] {
            Value::Null => Ok(None),
            Value::String(template) => Ok(Some(template.clone())),
            Value::Array(named) => {
                let default = named.iter().find(|entry| entry["name"] == "default");
                match default.and_then(|entry| entry["template"].as_str()) {
                    Some(template) => Ok(Some(template.to_owned())),
                    None => Err(Error::format(
                        &self.tokenizer_config_path(),
                        "chat_template",
                        "a list with a template named default",
                        format!("a list of {} without it", named.len()),
                    )),
                }
            }
            other => Err(Error::format(
                &self.tokenizer_config_path(),
                "chat_template",
                "a string or a list",
                shorten(&other.to_string()),
            )),
        }
    }

    fn tokenizer_config_path(&self) -> PathBuf {
        self.folder.join("tokenizer_config.json")
    }
}

fn read_if_there(file: &Path) -> Result<Option<Vec<u8>>> {
    match fs::read(file) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(file)(e)),
    }
}

fn parse<'de, T: Deserialize<'de>>(file: &Path, bytes: &'de [u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|e| Error::format(file, "JSON", "what the file is for", e.to_string()))
}
