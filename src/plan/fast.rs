//! The fast path: when a model can take it, where its weights lie, and its launches.

use super::{Bases, Buffers, Ending, LayerCache, Operation, Plan, Space, Step, Types, distinct_experts, prefill};
use crate::{
    checkpoint::DType,
    config::{FlintConfig, LayerKind, Mlp},
    kernels::{
        Args, DECODE_ATTENTION_GROUP, DECODE_ATTENTION_HEAD_DIM, DecodeAttentionArgs,
        decode::{
            self, DecodeDownArgs, DecodeEmbedArgs, DecodeExpertsUpArgs, DecodeLinearArgs, DecodeRouterArgs,
            LinearShape, NormArgs,
        },
        decode_attention_launch,
    },
    tiles::{TILE_ROWS, TileFormat},
};

pub(super) use crate::kernels::decode::MAX_ROWS;

/// H; the inputs of `decode_o` are 128 times that.
const HEADS: usize = 32;
/// The inputs of `decode_dense_down`.
const DENSE_WIDTH: usize = 6144;

/// A matrix in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Offset of its tiles.
    pub tiles: u64,
    /// Offset of its scales: `[strips, 2]` f32, or what its kernel's argument says.
    pub scales: u64,
}

/// Offsets of the weights of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FastLayer {
    /// `[D]` f32.
    pub attn_norm: u64,
    /// `[(H + 2G) 128 / 16, D / 512]` tiles: q, then k, then v.
    pub qkv: Packed,
    /// `[128]` f32.
    pub q_norm: u64,
    /// `[128]` f32.
    pub k_norm: u64,
    /// `[H]` f32.
    pub sinks: u64,
    /// `[D / 16, H 128 / 512]` tiles.
    pub output: Packed,
    /// `[D]` f32.
    pub mlp_norm: u64,
    /// The feed-forward part.
    pub mlp: FastMlp,
}

/// Offsets of the feed-forward part. Strips of `up` have 8 rows of gate and the same 8 of up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FastMlp {
    /// A dense layer.
    Dense {
        /// `[dense / 8, D / 512]` tiles.
        up: Packed,
        /// `[D / 16, dense / 512]` tiles.
        down: Packed,
    },
    /// A mixture of experts.
    Moe(FastMoe),
}

/// Offsets of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FastMoe {
    /// `[E, D]` f32.
    pub router: u64,
    /// `[3 E / 16, D / 512]` BF16 tiles of three matrices that add up to the same, for products over many rows.
    pub router_parts: u64,
    /// `[shared / 8, D / 512]` tiles.
    pub shared_up: Packed,
    /// `[E, F / 8, D / 512]` tiles; scales `[E, 2]`.
    pub up: Packed,
    /// `[E, D / 16, F / 512]` tiles; scales `[E]`.
    pub down: Packed,
    /// `[D / 16, shared / 512]` tiles.
    pub shared_down: u64,
    /// Its scale, an argument of the kernel; 1 until the weights are there.
    pub shared_down_scale: f32,
}

/// Offsets of all weights in one allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct FastWeights {
    /// `[V, D]` bf16.
    pub embedding: u64,
    /// One a layer.
    pub layers: Vec<FastLayer>,
    /// `[D]` f32.
    pub final_norm: u64,
    /// `[V / 16, D / 512]` tiles.
    pub lm_head: Packed,
    /// All of it.
    pub bytes: usize,
}

impl FastWeights {
    pub(super) fn new(config: &FlintConfig, format: TileFormat) -> Self {
        let mut space = Space::default();
        let tiles = |rows: usize, cols: usize| format.matrix_bytes(rows, cols).expect("the path asks for whole tiles");
        let (d, hd, e) = (config.hidden_size, config.head_dim, config.n_experts);
        let (f, shared, dense) =
            (config.expert_intermediate_size, config.shared_intermediate_size, config.dense_intermediate_size);
        let packed = |space: &mut Space, rows: usize, cols: usize| Packed {
            tiles: space.take(tiles(rows, cols)),
            scales: space.take(rows / TILE_ROWS * 2 * 4),
        };
        let embedding = space.take(config.vocab_size * d * 2);
        let layer = |kind: &LayerKind| FastLayer {
            attn_norm: space.take(d * 4),
            qkv: packed(&mut space, (config.n_heads + 2 * config.n_kv_heads) * hd, d),
            q_norm: space.take(hd * 4),
            k_norm: space.take(hd * 4),
            sinks: space.take(config.n_heads * 4),
            output: packed(&mut space, d, config.n_heads * hd),
            mlp_norm: space.take(d * 4),
            mlp: match kind.mlp {
                Mlp::Dense => {
                    FastMlp::Dense { up: packed(&mut space, 2 * dense, d), down: packed(&mut space, d, dense) }
                }
                Mlp::Moe => FastMlp::Moe(FastMoe {
                    router: space.take(e * d * 4),
                    router_parts: space.take(prefill::router_bytes(e, d)),
                    shared_up: packed(&mut space, 2 * shared, d),
                    up: Packed { tiles: space.take(e * tiles(2 * f, d)), scales: space.take(e * 2 * 4) },
                    down: Packed { tiles: space.take(e * tiles(d, f)), scales: space.take(e * 4) },
                    shared_down: space.take(tiles(d, shared)),
                    shared_down_scale: 1.0,
                }),
            },
        };
        let layers = config.layers.iter().map(layer).collect();
        let final_norm = space.take(d * 4);
        let lm_head = packed(&mut space, config.vocab_size, d);
        Self { embedding, layers, final_norm, lm_head, bytes: space.bytes() }
    }
}

/// The format of the tiles, or the first fact that keeps the model off this path.
pub(super) fn format(config: &FlintConfig, types: &Types) -> Result<TileFormat, String> {
    let moe = config.layers.iter().any(|layer| layer.mlp == Mlp::Moe);
    let dense = config.layers.iter().any(|layer| layer.mlp == Mlp::Dense);
    let group = DECODE_ATTENTION_GROUP as usize;
    for (applies, name, found, needed) in [
        (true, "hidden_size", config.hidden_size, decode::HIDDEN),
        (true, "head_dim", config.head_dim, DECODE_ATTENTION_HEAD_DIM as usize),
        (true, "n_heads", config.n_heads, HEADS),
        (true, "query heads a KV head", config.n_heads / config.n_kv_heads, group),
        (dense, "dense_intermediate_size", config.dense_intermediate_size, DENSE_WIDTH),
        (moe, "n_experts", config.n_experts, decode::EXPERTS),
        (moe, "n_experts_per_token", config.n_experts_per_token, decode::CHOSEN),
        (moe, "expert_intermediate_size", config.expert_intermediate_size, decode::EXPERT_WIDTH),
        (moe, "shared_intermediate_size", config.shared_intermediate_size, decode::SHARED_WIDTH),
    ] {
        if applies && found != needed {
            return Err(format!("{name} is {found}, the tiled kernels are made for {needed}"));
        }
    }
    if !config.vocab_size.is_multiple_of(TILE_ROWS) {
        return Err(format!("vocab_size is {}, the tiled kernels need a multiple of {TILE_ROWS}", config.vocab_size));
    }
    let mut format = None;
    for matrix in &types.0 {
        let refuse = |needed: &str| {
            let found = matrix.dtype.map_or("of several types".into(), |dtype| dtype.to_string());
            Err(format!("{} is {found}, the tiled kernels need {needed}", matrix.name))
        };
        let found = match matrix.dtype {
            _ if matrix.name.ends_with("ffn_gate_inp.weight") => continue,
            Some(DType::Bf16) if matrix.name == "token_embd.weight" => continue,
            _ if matrix.name == "token_embd.weight" => return refuse("BF16"),
            Some(DType::Nvfp4) => TileFormat::Nvfp4,
            Some(DType::Bf16) => TileFormat::Bf16,
            _ => return refuse("NVFP4 or BF16"),
        };
        if *format.get_or_insert(found) != found {
            return refuse("one type for all projections");
        }
    }
    format.ok_or_else(|| "there is no projection".into())
}

/// The launches of a step of 1 to 8 rows without its sampler, see [`Plan::steps`].
pub(super) fn steps(
    plan: &Plan,
    format: TileFormat,
    weights: &FastWeights,
    bases: &Bases,
    positions: &[u32],
    ending: Ending,
) -> Vec<Step> {
    let builder = Builder::new(plan, format, bases, positions);
    let mut steps = vec![builder.embed(weights)];
    for (index, (layer, cache)) in weights.layers.iter().zip(plan.cache(bases)).enumerate() {
        steps.push(builder.qkv(index, layer));
        steps.push(builder.attention(index, layer, &cache));
        steps.push(builder.output(index, layer));
        builder.mlp(index, layer, &mut steps);
    }
    if ending != Ending::Nothing {
        steps.push(builder.lm_head(weights));
    }
    steps
}

pub(super) struct Builder<'a> {
    plan: &'a Plan,
    format: TileFormat,
    weights: u64,
    pub buffers: Buffers,
    /// Of a panel of attention's results, for a product that reads panels; 0 for rows as they are.
    pub panel_rows: usize,
    positions: &'a [u32],
}

impl<'a> Builder<'a> {
    pub fn new(plan: &'a Plan, format: TileFormat, bases: &Bases, positions: &'a [u32]) -> Self {
        let buffers = plan.buffers.at(bases.buffers);
        Self { plan, format, weights: bases.weights, buffers, panel_rows: 0, positions }
    }

    fn rows(&self) -> usize {
        self.positions.len()
    }

    /// The first launch of a step of any number of rows.
    pub fn embed(&self, weights: &FastWeights) -> Step {
        let b = &self.buffers;
        Step {
            operation: Operation::Embed,
            layer: 0,
            kernel: decode::DECODE_EMBED,
            launch: decode::decode_embed_launch(self.rows()),
            args: Args::DecodeEmbed(DecodeEmbedArgs {
                embedding: self.weights + weights.embedding,
                tokens: b.tokens,
                positions: b.positions,
                inv_freq: b.inv_freq,
                delta: b.delta,
                residual: b.residual,
                rope: b.rope,
            }),
        }
    }

    /// The norm in front of attention or, with `middle`, in front of the feed-forward part.
    fn norm(&self, weight: u64, middle: bool) -> NormArgs {
        let b = &self.buffers;
        let (residual, new_residual) = if middle { (b.residual_mid, b.residual) } else { (b.residual, b.residual_mid) };
        NormArgs {
            delta: b.delta,
            residual,
            new_residual,
            normed: 0,
            weight: self.weights + weight,
            eps: self.plan.config.rms_norm_eps,
            rows: self.rows() as u32,
        }
    }

    /// For kernels that do not norm their input, over `rows` of them.
    fn no_norm(rows: usize) -> NormArgs {
        NormArgs { rows: rows as u32, ..NormArgs::default() }
    }

    /// A `decode_linear` kernel over `strips` strips, whose rows of `out` have `out_width` values of `out_bytes`, for all rows.
    #[allow(clippy::too_many_arguments, reason = "the kernel's own argument, taken apart once")]
    fn linear(
        &self,
        operation: Operation,
        layer: usize,
        (family, shape): (&decode::Family, LinearShape),
        (norm, x): (NormArgs, u64),
        (matrix, strips): (Packed, usize),
        (out, out_width, out_bytes): (u64, usize, usize),
    ) -> Step {
        let (rows, w) = (norm.rows as usize, self.weights);
        let args = DecodeLinearArgs {
            norm,
            x,
            weights: w + matrix.tiles,
            scales: w + matrix.scales,
            out,
            strips: strips as u32,
            out_stride: out_width as u32,
        };
        Step {
            operation,
            layer,
            kernel: family.kernel(self.format, rows),
            launch: shape.launch(self.format, rows, strips, (rows * out_width * out_bytes) as u64),
            args: Args::DecodeLinear(args),
        }
    }

    /// A dense layer's down projection. Its 8 rows of 6,144 inputs are more than a block of some cards has shared memory for;
    /// 4 at a time give the same bits.
    fn dense_down(&self, index: usize, down: Packed, steps: &mut Vec<Step>) {
        let (b, d, card) = (&self.buffers, self.plan.config.hidden_size, self.plan.card);
        let (shape, strips) = (LinearShape::dense_down(card.processors), d / TILE_ROWS);
        let fits = |rows| {
            let launch = shape.launch(self.format, rows, strips, 0);
            launch.shared_bytes as usize <= card.block_shared_bytes
        };
        let each = if fits(self.rows()) { self.rows() } else { MAX_ROWS / 2 };
        for first in (0..self.rows()).step_by(each) {
            let norm = Self::no_norm(each.min(self.rows() - first));
            steps.push(self.linear(
                Operation::DenseDown,
                index,
                (&decode::DECODE_DENSE_DOWN, shape),
                (norm, b.act + (2 * first * DENSE_WIDTH) as u64),
                (down, strips),
                (b.delta + (2 * first * d) as u64, d, 2),
            ));
        }
    }

    fn qkv(&self, index: usize, layer: &FastLayer) -> Step {
        let config = &self.plan.config;
        let qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim;
        self.linear(
            Operation::Qkv,
            index,
            (&decode::DECODE_QKV, decode::QKV_SHAPE),
            (self.norm(layer.attn_norm, false), 0),
            (layer.qkv, qkv / TILE_ROWS),
            (self.buffers.qkv, qkv, 2),
        )
    }

    /// Of a step of any number of rows.
    pub fn attention(&self, index: usize, layer: &FastLayer, cache: &LayerCache) -> Step {
        let (b, config) = (&self.buffers, &self.plan.config);
        let card = (self.plan.card.major, self.plan.card.processors as u32);
        let (kernel, launch) = decode_attention_launch(card, config.n_kv_heads as u32, cache.window, self.positions)
            .expect("a step has no more rows than a launch holds, and the path 4 KV heads");
        Step {
            operation: Operation::Attention,
            layer: index,
            kernel,
            launch,
            args: Args::DecodeAttention(DecodeAttentionArgs {
                qkv: b.qkv,
                kv: cache.kv,
                blocks: cache.blocks,
                positions: b.positions,
                q_norm: self.weights + layer.q_norm,
                k_norm: self.weights + layer.k_norm,
                rope: if cache.inv_freq == 0 { 0 } else { b.rope },
                sinks: self.weights + layer.sinks,
                attn: b.attn,
                partial: if cache.window.is_none() { b.attn_partial } else { 0 },
                counters: if cache.window.is_none() { b.attn_counters } else { 0 },
                block_stride: cache.block_stride,
                table_stride: b.table_stride as u32,
                window: cache.window.unwrap_or(0),
                eps: config.rms_norm_eps,
                rows: self.rows() as u32,
                kv_heads: config.n_kv_heads as u32,
                panel_rows: self.panel_rows as u32,
            }),
        }
    }

    fn output(&self, index: usize, layer: &FastLayer) -> Step {
        let (b, d) = (&self.buffers, self.plan.config.hidden_size);
        self.linear(
            Operation::Output,
            index,
            (&decode::DECODE_O, LinearShape::o(self.plan.card.processors)),
            (Self::no_norm(self.rows()), b.attn),
            (layer.output, d / TILE_ROWS),
            (b.delta, d, 2),
        )
    }

    fn mlp(&self, index: usize, layer: &FastLayer, steps: &mut Vec<Step>) {
        let b = &self.buffers;
        let norm = self.norm(layer.mlp_norm, true);
        match layer.mlp {
            FastMlp::Dense { up, down } => {
                steps.push(self.linear(
                    Operation::DenseUp,
                    index,
                    (&decode::DECODE_DENSE_UP, decode::DENSE_UP_SHAPE),
                    (norm, 0),
                    (up, 2 * DENSE_WIDTH / TILE_ROWS),
                    (b.act, DENSE_WIDTH, 2),
                ));
                self.dense_down(index, down, steps);
            }
            FastMlp::Moe(FastMoe { router, shared_up, up, down, shared_down, shared_down_scale, .. }) => {
                let (rows, format, w) = (self.rows(), self.format, self.weights);
                let config = &self.plan.config;
                let distinct = distinct_experts(config.n_experts, config.n_experts_per_token, rows);
                steps.push(Step {
                    operation: Operation::Router,
                    layer: index,
                    kernel: decode::DECODE_ROUTER.kernel(format, rows),
                    launch: decode::decode_router_launch(rows, self.plan.card.processors),
                    args: Args::DecodeRouter(DecodeRouterArgs {
                        norm: NormArgs { normed: b.normed, ..norm },
                        router: w + router,
                        scores: b.router_scores,
                    }),
                });
                steps.push(Step {
                    operation: Operation::ExpertsUp,
                    layer: index,
                    kernel: decode::DECODE_EXPERTS_UP.kernel(format, rows),
                    launch: decode::decode_experts_up_launch(format, rows, distinct),
                    args: Args::DecodeExpertsUp(DecodeExpertsUpArgs {
                        x: b.normed,
                        scores: b.router_scores,
                        gate_up: w + up.tiles,
                        scales: w + up.scales,
                        act: b.act,
                        shared_gate_up: w + shared_up.tiles,
                        shared_scales: w + shared_up.scales,
                        act_shared: b.act_shared,
                        rows: rows as u32,
                        reserved: 0,
                    }),
                });
                steps.push(Step {
                    operation: Operation::Down,
                    layer: index,
                    kernel: decode::DECODE_DOWN.kernel(format, rows),
                    launch: decode::decode_down_launch(format, rows, distinct, self.plan.card.processors),
                    args: Args::DecodeDown(DecodeDownArgs {
                        scores: b.router_scores,
                        down: w + down.tiles,
                        scales: w + down.scales,
                        shared_down: w + shared_down,
                        act: b.act,
                        act_shared: b.act_shared,
                        delta: b.delta,
                        shared_scale: shared_down_scale,
                        rows: rows as u32,
                    }),
                });
            }
        }
    }

    fn lm_head(&self, weights: &FastWeights) -> Step {
        let vocab = self.plan.config.vocab_size;
        let shape = LinearShape::lm_head(self.plan.card.processors, self.format);
        self.linear(
            Operation::LmHead,
            weights.layers.len(),
            (&decode::DECODE_LM_HEAD, shape),
            (self.norm(weights.final_norm, false), 0),
            (weights.lm_head, vocab / TILE_ROWS),
            (self.buffers.logits, vocab, 4),
        )
    }
}
