//! What a checkpoint holds, from its headers alone; no tensor is read.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    checkpoint::Checkpoint,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    error::{Error, Result},
    tokenizer::Tokenizer,
    weights::{self, ParameterCount},
};

/// Facts about a checkpoint; [`fmt::Display`] gives them to a person, [`Serialize`] to a program.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// What was inspected.
    pub path: PathBuf,
    /// `gguf` or `safetensors`.
    pub format: &'static str,
    /// The files that hold tensors.
    pub files: Vec<FileInfo>,
    /// Dimensions and layers.
    pub config: FlintConfig,
    /// Weights that the config calls for.
    pub parameters: ParameterCount,
    /// Tensors by type, in the order of their names.
    pub tensors: Vec<TypeInfo>,
    /// `None` when the checkpoint has no tokenizer.
    pub tokenizer: Option<TokenizerInfo>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileInfo {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// The tensors of one type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TypeInfo {
    /// The type's name.
    pub dtype: &'static str,
    /// How many tensors have it.
    pub tensors: usize,
    /// What they take.
    pub bytes: u64,
}

/// What the tokenizer knows.
#[derive(Clone, Debug, Serialize)]
pub struct TokenizerInfo {
    /// Number of ids.
    pub vocab_size: usize,
    /// Markers that are no text.
    pub control_tokens: Vec<TokenInfo>,
    /// Those that end a turn.
    pub end_tokens: Vec<TokenInfo>,
    /// The jinja source that renders messages.
    pub chat_template: Option<String>,
}

/// One token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenInfo {
    /// Its id.
    pub id: u32,
    /// How it is spelled.
    pub text: String,
}

/// Inspects a GGUF or a safetensors folder. Errors: what opening `path` and reading its config and tokenizer can refuse.
pub fn inspect(path: &Path) -> Result<Inspection> {
    let checkpoint = Checkpoint::open(path)?;
    let config = FlintConfig::from_checkpoint(&checkpoint)?;
    let (format, tensors) = match &checkpoint {
        Checkpoint::Gguf(gguf) => ("gguf", &gguf.tensors),
        Checkpoint::Safetensors(dir) => ("safetensors", &dir.tensors),
    };
    let mut types = BTreeMap::new();
    let mut files = BTreeMap::new();
    for tensor in tensors.values() {
        let entry = types.entry(tensor.dtype.name()).or_insert((0, 0));
        *entry = (entry.0 + 1, entry.1 + tensor.data.len() as u64);
        if !files.contains_key(tensor.file.as_path()) {
            let size = fs::metadata(tensor.file.as_path()).map_err(Error::io(&tensor.file))?.len();
            files.insert(tensor.file.as_path(), size);
        }
    }
    let tokenizer = match Tokenizer::from_checkpoint(&checkpoint) {
        Ok(tokenizer) => Some(TokenizerInfo::new(&tokenizer)?),
        Err(Error::Unavailable { .. }) => None,
        Err(error) => return Err(error),
    };
    Ok(Inspection {
        path: path.to_path_buf(),
        format,
        files: files.into_iter().map(|(path, bytes)| FileInfo { path: path.to_path_buf(), bytes }).collect(),
        parameters: weights::parameter_count(&config),
        config,
        tensors: types.into_iter().map(|(dtype, (tensors, bytes))| TypeInfo { dtype, tensors, bytes }).collect(),
        tokenizer,
    })
}

impl TokenizerInfo {
    fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let info = |id| Ok(TokenInfo { id, text: tokenizer.decode(&[id], false)? });
        let control = (0..tokenizer.vocab_size() as u32).filter(|id| tokenizer.is_control(*id));
        Ok(Self {
            vocab_size: tokenizer.vocab_size(),
            control_tokens: control.map(info).collect::<Result<_>>()?,
            end_tokens: tokenizer.end_token_ids().iter().copied().map(info).collect::<Result<_>>()?,
            chat_template: tokenizer.chat_template().map(str::to_owned),
        })
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.config;
        let bytes = self.files.iter().map(|file| file.bytes).sum();
        writeln!(f, "{}: {}, {} in {} file(s)", self.path.display(), self.format, Size(bytes), self.files.len())?;
        writeln!(f)?;
        let ParameterCount { total, active } = self.parameters;
        let mut line = |name: &str, fact: String| writeln!(f, "{name:16}{fact}");
        line("parameters", format!("{}, of which a token uses {}", Count(total), Count(active)))?;
        line("hidden size", c.hidden_size.to_string())?;
        line("vocabulary", c.vocab_size.to_string())?;
        line("context", format!("{} tokens", c.context_length))?;
        let heads = format!("{} query and {} key/value heads of {}", c.n_heads, c.n_kv_heads, c.head_dim);
        line("attention", format!("{heads}; window {}", c.sliding_window))?;
        line("RoPE base", c.rope_theta.to_string())?;
        line("RMSNorm epsilon", format!("{:e}", c.rms_norm_eps))?;
        line("dense MLP", format!("width {}", c.dense_intermediate_size))?;
        let experts =
            format!("{} of {} experts of width {}", c.n_experts_per_token, c.n_experts, c.expert_intermediate_size);
        line("MoE", format!("{experts}, and a shared one of {}", c.shared_intermediate_size))?;

        writeln!(f, "\n{} layers", c.layers.len())?;
        let mut first = 0;
        for run in c.layers.chunk_by(|a, b| a == b) {
            let last = first + run.len() - 1;
            let range = if run.len() == 1 { first.to_string() } else { format!("{first}-{last}") };
            writeln!(f, "  {range:14}{}", Kind(run[0]))?;
            first = last + 1;
        }

        writeln!(f, "\n{} tensors", self.tensors.iter().map(|t| t.tensors).sum::<usize>())?;
        for t in &self.tensors {
            writeln!(f, "  {:14}{:>6}{:>14}", t.dtype, t.tensors, Size(t.bytes).to_string())?;
        }

        let Some(tokenizer) = &self.tokenizer else { return writeln!(f, "\nno tokenizer") };
        writeln!(f, "\ntokenizer of {} tokens", tokenizer.vocab_size)?;
        for (name, tokens) in [("control", &tokenizer.control_tokens), ("end of turn", &tokenizer.end_tokens)] {
            let list: Vec<_> = tokens.iter().map(|t| format!("{} ({})", t.text.escape_debug(), t.id)).collect();
            writeln!(f, "  {name:14}{}", if list.is_empty() { "none".into() } else { list.join(", ") })?;
        }
        match &tokenizer.chat_template {
            None => writeln!(f, "\nno chat template"),
            Some(template) => writeln!(f, "\nchat template\n{}", printable(template)),
        }
    }
}

/// `text` without characters that would command a terminal.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() && !matches!(c, '\n' | '\t') { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// A layer in words.
struct Kind(LayerKind);

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let attention = match self.0.attention {
            Attention::Full => "full attention",
            Attention::Sliding => "sliding window",
        };
        let rope = if self.0.rope { "RoPE" } else { "no RoPE" };
        let mlp = match self.0.mlp {
            Mlp::Dense => "dense MLP",
            Mlp::Moe => "MoE",
        };
        write!(f, "{attention}, {rope}, {mlp}")
    }
}

/// Bytes in decimal units.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1_000_000_000.. => write!(f, "{:.2} GB", self.0 as f64 / 1e9),
            1_000_000.. => write!(f, "{:.2} MB", self.0 as f64 / 1e6),
            1_000.. => write!(f, "{:.2} kB", self.0 as f64 / 1e3),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

/// A number of parameters.
struct Count(u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1_000_000_000.. => write!(f, "{:.2} billion", self.0 as f64 / 1e9),
            1_000_000.. => write!(f, "{:.2} million", self.0 as f64 / 1e6),
            count => write!(f, "{count}"),
        }
    }
}
