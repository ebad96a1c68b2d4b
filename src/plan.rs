//! What the GPU is going to do, as data: which path, where weights and buffers lie, which kernels a step launches with
//! which arguments, and how many bytes each has to move. Made from a checkpoint's header; no driver, so all of it is printed
//! and tested without a GPU, and the GPU backend runs exactly this.

mod batch;
mod buffers;
mod chunk;
mod fast;
mod fit;
mod general;
mod prefill;
mod print;
mod types;

use crate::{
    checkpoint::Checkpoint,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    error::{Error, Result},
    kernels::{
        Args, DECODE_ATTENTION_ROWS, DECODE_SAMPLE, DecodeSampleArgs, Kernel, Launch, SAMPLE_VOCAB_MOST,
        decode_sample_launch,
    },
    kv::{BLOCK_POSITIONS, KvBlocks, PoolLayout},
    tiles::TileFormat,
};

use buffers::PrefillBuffers;
pub use buffers::{Buffers, Space};
pub use chunk::{Chunk, ChunkInputs, Part};
pub use fast::{FastLayer, FastMlp, FastMoe, FastWeights, Packed};
pub use fit::fit;
pub use general::{GeneralLayer, GeneralMlp, GeneralWeights, Stored};
pub use print::{H200_BYTES_PER_SECOND, H200_FLOPS, Totals};
pub use types::{MatrixType, Types};

pub use crate::kernels::decode::distinct_experts;

/// Most sequences of a step. On the fast path up to 8 have kernels of their own, and more take those of prefill.
pub const MAX_ROWS: usize = DECODE_ATTENTION_ROWS as usize;
/// Most tokens of a chunk unless another number is asked for; [`fit`] takes fewer where a card's memory or multiprocessors
/// are few, see `plan/chunk.rs`.
pub const CHUNK_TOKENS: usize = 8192;
/// Most tokens of a chunk.
const CHUNK_TOKENS_MOST: usize = 1 << 16;
/// Steps whose tokens the host may not have read yet, at most.
pub const TOKEN_RING: usize = 4;

/// What a plan is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sequences at a time, 1 to 256: what a sequence has of its own, whatever it is for, there are so many of.
    pub sequences: usize,
    /// Positions of each, at most the model's context length.
    pub context_tokens: usize,
    /// Tokens that may be chosen, those of the tokenizer: at most the rows of the LM head.
    pub vocab_tokens: usize,
    /// Tokens of prompts that a step takes, 1 to 65,536; see [`CHUNK_TOKENS`] and [`fit`]. A plan takes fewer where no step could have
    /// so many, and on the general path.
    pub chunk_tokens: usize,
}

/// What a plan needs to know of the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its multiprocessors.
    pub processors: usize,
    /// Its compute capability before the point, 8 or more: both paths run on all of them. 8 has neither clusters nor
    /// dependent launches, and 9 alone has `wgmma`.
    pub major: i32,
    /// Shared memory that a block may have: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6, 8.9 and 12.0.
    pub block_shared_bytes: usize,
}

impl Card {
    /// What a plan assumes without a GPU.
    pub const H200: Self = Self { processors: 132, major: 9, block_shared_bytes: 227 << 10 };
}

/// Which kernels run the model; all of it takes one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// Kernels for Flint's dimensions on tiles of this format.
    Fast(TileFormat),
    /// Kernels for any dimensions.
    General {
        /// The fact that keeps the model off the fast path.
        because: String,
    },
}

/// Where the weights lie.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightPlan {
    /// In tiles.
    Fast(TileFormat, FastWeights),
    /// As the file has them.
    General(GeneralWeights),
}

/// What follows the last layer of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    /// Nothing: the step only fills the KV cache.
    Nothing,
    /// Logits.
    Logits,
    /// Logits and the choice of a token, which feeds the next step.
    Token,
}

/// What a kernel does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// Rows of the embedding.
    Embed,
    /// Residual add and norm, where they are a kernel of their own.
    Norm,
    /// q, k and v; through the kernels of decode with the norm in front.
    Qkv,
    /// q/k norm, rotation and KV write, where they are a kernel of their own.
    QkvFinish,
    /// Attention; through the kernels of decode with what is before it.
    Attention,
    /// Attention's output projection.
    Output,
    /// A dense layer's gate and up.
    DenseUp,
    /// A dense layer's down projection.
    DenseDown,
    /// Router logits; through the kernels of decode scores, with the norm in front.
    Router,
    /// The choice of experts, where it is a kernel of its own.
    Choose,
    /// The order of tokens by expert, in a chunk or a step of many rows.
    Group,
    /// Their rows in that order.
    Gather,
    /// The shared expert's gate and up, where they are a kernel of their own.
    SharedUp,
    /// The chosen experts' gate and up; of few rows with the shared expert's.
    ExpertsUp,
    /// The chosen experts' and the shared expert's down projection, and their sum.
    Down,
    /// The chosen experts' down projection, where it is not in `Down`; of few rows with the shared expert's.
    ExpertsDown,
    /// The shared expert's, where it is a kernel of its own.
    SharedDown,
    /// The sum of both.
    Combine,
    /// Logits; through the kernels of decode with the norm in front.
    LmHead,
    /// The choice of the next token.
    Sample,
}

/// One launch of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// What it does.
    pub operation: Operation,
    /// The layer it belongs to; the number of layers for what follows them, 0 for what is before.
    pub layer: usize,
    /// The kernel.
    pub kernel: Kernel,
    /// Its geometry, the same for every position, and the bytes that it has to move at the given ones.
    pub launch: Launch,
    /// Its argument.
    pub args: Args,
}

/// Device addresses that a plan's offsets count from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bases {
    /// Of [`Memory::weights_bytes`].
    pub weights: u64,
    /// Of [`Memory::workspace_bytes`].
    pub buffers: u64,
    /// Of the full-attention layers' pool.
    pub kv_full: u64,
    /// Of the sliding layers' pool.
    pub kv_window: u64,
    /// Of the sampler's records in host memory, `[TOKEN_RING, sequences, 48]` u32.
    pub records: u64,
}

/// Bytes of device memory, by what holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights, as packed.
    pub weights_bytes: usize,
    /// KV pools.
    pub kv_bytes: usize,
    /// Activations, tables, partial results.
    pub workspace_bytes: usize,
}

impl Memory {
    /// All of it.
    pub fn total_bytes(&self) -> usize {
        self.weights_bytes + self.kv_bytes + self.workspace_bytes
    }
}

/// The two KV pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Of the full-attention layers.
    pub full: PoolLayout,
    /// Its blocks.
    pub full_blocks: usize,
    /// Of the sliding layers.
    pub window: PoolLayout,
    /// Its blocks.
    pub window_blocks: usize,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Plan {
    config: FlintConfig,
    limits: Limits,
    card: Card,
    path: Path,
    weights: WeightPlan,
    buffers: Buffers,
    chunk: Chunk,
    workspace_bytes: usize,
    pools: Pools,
}

/// The plan for a checkpoint on an H200, from its header; without `context_tokens` for the model's whole context.
pub fn of_file(path: &std::path::Path, sequences: usize, context_tokens: Option<usize>) -> Result<Plan> {
    let checkpoint = Checkpoint::open(path)?;
    let config = FlintConfig::from_checkpoint(&checkpoint)?;
    let limits = Limits {
        sequences,
        context_tokens: context_tokens.unwrap_or(config.context_length),
        vocab_tokens: config.vocab_size,
        chunk_tokens: CHUNK_TOKENS,
    };
    Plan::new(&config, &Types::of_checkpoint(&checkpoint, &config)?, limits, Card::H200)
}

impl Plan {
    /// The plan for a model of these dimensions and types. Errors: [`Error::Value`] naming the limit that is out of range;
    /// [`Error::Unavailable`] for a model that neither path runs.
    pub fn new(config: &FlintConfig, types: &Types, limits: Limits, card: Card) -> Result<Self> {
        for (field, value, most) in [
            ("sequences", limits.sequences, MAX_ROWS),
            ("context_tokens", limits.context_tokens, config.context_length),
            ("vocab_tokens", limits.vocab_tokens, config.vocab_size.min(SAMPLE_VOCAB_MOST)),
            ("chunk_tokens", limits.chunk_tokens, CHUNK_TOKENS_MOST),
        ] {
            if !(1..=most).contains(&value) {
                return Err(Error::value(field, value.to_string(), format!("1 to {most}")));
            }
        }
        let (path, weights) = match fast::format(config, types) {
            Ok(format) => (Path::Fast(format), WeightPlan::Fast(format, FastWeights::new(config, format))),
            Err(because) => (Path::General { because }, WeightPlan::General(GeneralWeights::new(config, types)?)),
        };
        let mut space = Space::default();
        let chunk_tokens = chunk::tokens(&path, limits);
        let buffers = Buffers::new(&mut space, config, &path, limits, chunk_tokens);
        let chunk = Chunk::new(&mut space, config, &path, limits, chunk_tokens);
        Ok(Self {
            config: config.clone(),
            limits,
            card,
            path,
            weights,
            buffers,
            chunk,
            workspace_bytes: space.bytes(),
            pools: Pools {
                full: PoolLayout::new(config, Attention::Full),
                full_blocks: limits.sequences * table_stride(limits),
                window: PoolLayout::new(config, Attention::Sliding),
                window_blocks: window_blocks(config, limits, chunk_tokens),
            },
        })
    }

    /// The model's dimensions.
    pub fn config(&self) -> &FlintConfig {
        &self.config
    }

    /// What it holds.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The card it is made for.
    pub fn card(&self) -> Card {
        self.card
    }

    /// Which kernels run it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where weights lie.
    pub fn weights(&self) -> &WeightPlan {
        &self.weights
    }

    /// The same, for who brings the weights there: scales that are arguments are known only then.
    pub fn weights_mut(&mut self) -> &mut WeightPlan {
        &mut self.weights
    }

    /// Where everything else but the KV cache lies.
    pub fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// What a chunk is.
    pub fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    /// The KV cache.
    pub fn pools(&self) -> Pools {
        self.pools
    }

    /// What the device must hold.
    pub fn memory(&self) -> Memory {
        let Pools { full, full_blocks, window, window_blocks } = self.pools;
        Memory {
            weights_bytes: match &self.weights {
                WeightPlan::Fast(_, weights) => weights.bytes,
                WeightPlan::General(weights) => weights.bytes,
            },
            kv_bytes: full.block_bytes() * full_blocks + window.block_bytes() * window_blocks,
            workspace_bytes: self.workspace_bytes,
        }
    }

    /// The launches of a step for new tokens at `positions`, one a row, in order. Kernels, geometry and arguments depend on
    /// the number of rows alone; the bytes to move on the positions too.
    ///
    /// # Panics
    /// Without rows, or with more than the plan holds.
    pub fn steps(&self, bases: &Bases, positions: &[u32], ending: Ending) -> Vec<Step> {
        assert!((1..=self.limits.sequences).contains(&positions.len()), "{} rows", positions.len());
        let mut steps = match &self.weights {
            WeightPlan::Fast(format, weights) if positions.len() <= fast::MAX_ROWS => {
                fast::steps(self, *format, weights, bases, positions, ending)
            }
            WeightPlan::Fast(format, weights) => batch::steps(self, *format, weights, bases, positions, ending),
            WeightPlan::General(weights) => general::steps(self, weights, bases, positions, ending),
        };
        if ending == Ending::Token {
            steps.push(self.sample(bases, positions.len()));
        }
        steps
    }

    fn sample(&self, bases: &Bases, rows: usize) -> Step {
        let (b, vocab) = (self.buffers.at(bases.buffers), self.limits.vocab_tokens);
        let launch = decode_sample_launch(rows, vocab, self.card.major);
        Step {
            operation: Operation::Sample,
            layer: self.config.layers.len(),
            kernel: DECODE_SAMPLE,
            launch,
            args: Args::DecodeSample(DecodeSampleArgs {
                logits: b.logits,
                rows: b.sample_rows,
                masks: b.sample_masks,
                bias: b.sample_bias,
                seen: b.sample_seen,
                workspace: b.sample_workspace,
                tokens: b.tokens,
                positions: b.positions,
                ring: bases.records,
                vocab: vocab as u32,
                logits_stride: self.config.vocab_size as u32,
                ring_lines: TOKEN_RING as u32,
                ring_rows: self.limits.sequences as u32,
            }),
        }
    }

    /// For each layer.
    fn cache(&self, bases: &Bases) -> Vec<LayerCache> {
        let buffers = self.buffers.at(bases.buffers);
        let (mut n_full, mut n_window) = (0, 0);
        let of = |&layer: &LayerKind| {
            let (pool, base, table, index) = match layer.attention {
                Attention::Full => (self.pools.full, bases.kv_full, buffers.blocks_full, &mut n_full),
                Attention::Sliding => (self.pools.window, bases.kv_window, buffers.blocks_window, &mut n_window),
            };
            let kv = base + (2 * pool.layer_values() * *index) as u64;
            *index += 1;
            LayerCache {
                kv,
                block_stride: pool.block_values() as u64,
                blocks: table,
                window: window(&self.config, layer),
                inv_freq: if layer.rope { buffers.inv_freq } else { 0 },
            }
        };
        self.config.layers.iter().map(of).collect()
    }
}

/// What attention of one layer reads beside activations.
#[derive(Clone, Copy, Debug)]
struct LayerCache {
    /// Its part of block 0 of its pool.
    kv: u64,
    /// bf16 values from a block to the next.
    block_stride: u64,
    /// Its block table.
    blocks: u64,
    /// `None` for full attention.
    window: Option<u32>,
    /// Rotary frequencies; 0 for no rotation.
    inv_freq: u64,
}

/// Blocks of the sliding layers' pool. Each sequence has those of its window at any position; a chunk, whose tokens all have
/// their keys in the cache before attention reads any, needs its own on top, shared by all sequences: they go back when it
/// is queued.
fn window_blocks(config: &FlintConfig, limits: Limits, chunk_tokens: usize) -> usize {
    let each = KvBlocks::window_blocks_for(config.sliding_window, BLOCK_POSITIONS);
    let most = limits.sequences * table_stride(limits);
    most.min(limits.sequences * each + chunk_tokens.div_ceil(BLOCK_POSITIONS))
}

/// Entries of a row of a block table.
fn table_stride(limits: Limits) -> usize {
    KvBlocks::full_blocks_for(limits.context_tokens)
}

/// The window of a layer; `None` sees everything.
fn window(config: &FlintConfig, layer: LayerKind) -> Option<u32> {
    (layer.attention == Attention::Sliding).then_some(config.sliding_window as u32)
}

/// Width of a row's activations between the halves of its MLP: of all chosen experts, or of a dense layer if that is more.
fn act_width(config: &FlintConfig) -> usize {
    let width = |layer: &LayerKind| match layer.mlp {
        Mlp::Dense => config.dense_intermediate_size,
        Mlp::Moe => config.n_experts_per_token * config.expert_intermediate_size,
    };
    config.layers.iter().map(width).max().unwrap_or(0)
}
