//! Chunks on the fast path: their buffers and launches.

use super::{
    Bases, Buffers, ChunkInputs, FastLayer, FastMlp, FastMoe, FastWeights, LayerCache, Limits, Operation, Packed, Part,
    Plan, PrefillBuffers, Step,
};
use crate::{
    kernels::{
        Args, Kernel, Launch, PREFILL_EMBED, PREFILL_KV, PrefillAttention, PrefillAttentionArgs, PrefillEmbedArgs,
        PrefillKvArgs, PrefillNormArgs, PrefillTile,
        decode::EXPERTS,
        prefill::{
            self, PREFILL_COMBINE, PREFILL_COMBINE_NORM, PREFILL_GROUP, PREFILL_ROUTE, PrefillCombineArgs,
            PrefillCombineNormArgs, PrefillExpertsArgs, PrefillGatherArgs, PrefillGroupArgs, PrefillLinearArgs,
            PrefillRouteArgs, Products, ROWS_STEP, prefill_combine_launch, prefill_combine_norm_launch,
            prefill_gather_launch, prefill_group_launch, prefill_route_launch,
        },
        prefill_embed_launch, prefill_kv_launch, prefill_norm_launch,
    },
    tiles::{PARTS, TILE_COLS, TILE_ROWS, TileFormat},
};

/// Tokens of a tile of attention.
const TILE_TOKENS: usize = 16;

/// Bytes of the tiles of a router's parts.
pub(super) fn router_bytes(n_experts: usize, d: usize) -> usize {
    TileFormat::Bf16.matrix_bytes(PARTS * n_experts, d).expect("the path asks for whole tiles")
}

/// Attention's tiles.
pub(super) fn tiles(parts: &[Part]) -> Vec<PrefillTile> {
    let positions = |part: &Part| (part.slot as u32, part.first as u32..(part.first + part.tokens) as u32);
    PrefillTile::cut(parts.iter().map(positions))
}

/// Most of them in a chunk: a part may begin and end inside of one.
pub(super) fn most_tiles(tokens: usize, limits: Limits) -> usize {
    tokens / TILE_TOKENS + 2 * limits.sequences
}

const FITS: &str = "a chunk has 1 to 65,536 tokens, and the path 4 KV heads";

/// The launches of a chunk, see [`Plan::chunk_steps`].
pub(super) fn steps(
    plan: &Plan,
    format: TileFormat,
    weights: &FastWeights,
    bases: &Bases,
    parts: &[Part],
    logits: bool,
) -> Vec<Step> {
    let tiles = tiles(parts);
    let builder = Builder::new(plan, format, bases, parts.iter().map(|part| part.tokens).sum());
    let mut steps = vec![builder.embed(weights), builder.norm(Norm::of(weights, 0))];
    for (index, (layer, cache)) in weights.layers.iter().zip(plan.cache(bases)).enumerate() {
        builder.keys(index, layer, &cache, &tiles, &mut steps);
        let next = (index + 1 < weights.layers.len()).then(|| Norm::of(weights, index + 1));
        if logits || next.is_some() {
            builder.attention(index, layer, &cache, &tiles, &mut steps);
            builder.mlp(index, layer, next, &mut steps);
        }
    }
    steps
}

/// The launches behind a chunk for the logits of `rows` of its tokens from `first` on, see [`Plan::logits_steps`].
pub(super) fn logits_steps(
    plan: &Plan,
    format: TileFormat,
    weights: &FastWeights,
    bases: &Bases,
    first: usize,
    rows: usize,
) -> Vec<Step> {
    let mut builder = Builder::new(plan, format, bases, rows);
    let before = (2 * first * plan.config.hidden_size) as u64;
    builder.buffers.delta += before;
    builder.buffers.residual += before;
    let norm = builder.norm(Norm::of(weights, weights.layers.len()));
    vec![norm, builder.logits(weights, builder.buffers.logits)]
}

/// The norm in front of a layer, or behind the last.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    layer: usize,
    /// Offset of its weight.
    weight: u64,
}

impl Norm {
    pub fn of(weights: &FastWeights, layer: usize) -> Self {
        let weight = weights.layers.get(layer).map_or(weights.final_norm, |layer| layer.attn_norm);
        Self { layer, weight }
    }
}

fn step(operation: Operation, layer: usize, (kernel, launch): (Kernel, Launch), args: Args) -> Step {
    Step { operation, layer, kernel, launch, args }
}

pub(super) struct Builder<'a> {
    plan: &'a Plan,
    format: TileFormat,
    products: Products,
    weights: u64,
    pub buffers: PrefillBuffers,
    /// Of decode, for what both share.
    shared: Buffers,
    inputs: ChunkInputs,
    rows: usize,
}

impl<'a> Builder<'a> {
    pub fn new(plan: &'a Plan, format: TileFormat, bases: &Bases, rows: usize) -> Self {
        Self {
            plan,
            format,
            products: Products::of(plan.card.major, plan.card.processors),
            weights: bases.weights,
            buffers: plan.chunk.prefill.expect("a plan of the fast path has them").at(bases.buffers),
            shared: plan.buffers.at(bases.buffers),
            inputs: plan.chunk.inputs.at(bases.buffers),
            rows,
        }
    }

    pub fn panel_rows(&self) -> usize {
        self.rows.next_multiple_of(ROWS_STEP)
    }

    fn embed(&self, weights: &FastWeights) -> Step {
        let b = &self.buffers;
        let args = PrefillEmbedArgs {
            embedding: self.weights + weights.embedding,
            tokens: self.inputs.tokens,
            delta: b.delta,
            residual: b.residual,
            rows: self.rows as u32,
            reserved: 0,
        };
        let launch = (PREFILL_EMBED, prefill_embed_launch(self.rows));
        step(Operation::Embed, 0, launch, Args::PrefillEmbed(args))
    }

    pub fn norm(&self, Norm { layer, weight }: Norm) -> Step {
        let b = &self.buffers;
        let args = PrefillNormArgs {
            delta: b.delta,
            residual: b.residual,
            weight: self.weights + weight,
            normed: b.normed,
            rows: self.rows as u32,
            panel_rows: self.panel_rows() as u32,
            eps: self.plan.config.rms_norm_eps,
            reserved: 0,
        };
        step(Operation::Norm, layer, prefill_norm_launch(self.rows), Args::PrefillNorm(args))
    }

    /// A product of `strips` strips over `inputs` inputs, with one scale for all of it: 1.
    fn linear_args(
        &self,
        x: u64,
        tiles: u64,
        strips: usize,
        inputs: usize,
        (out, out_stride): (u64, usize),
    ) -> PrefillLinearArgs {
        PrefillLinearArgs {
            x,
            weights: tiles,
            scales: 0,
            out,
            rows: self.rows as u32,
            panel_rows: self.panel_rows() as u32,
            strips: strips as u32,
            k_tiles: (inputs / TILE_COLS) as u32,
            out_stride: out_stride as u32,
            scale: 1.0,
        }
    }

    /// A product from panels to rows of `outputs` values.
    fn linear(
        &self,
        operation: Operation,
        layer: usize,
        (x, inputs): (u64, usize),
        matrix: Packed,
        (out, outputs): (u64, usize),
    ) -> Step {
        let args = self.linear_args(x, self.weights + matrix.tiles, outputs / TILE_ROWS, inputs, (out, outputs));
        let args = PrefillLinearArgs { scales: self.weights + matrix.scales, ..args };
        step(operation, layer, self.products.linear(self.format, &args), Args::PrefillLinear(args))
    }

    /// Gate and up over `normed`, to panels of `width` activations.
    fn swiglu(&self, operation: Operation, layer: usize, matrix: Packed, out: u64, width: usize) -> Step {
        let (x, inputs) = (self.buffers.normed, self.plan.config.hidden_size);
        let strips = 2 * width / TILE_ROWS;
        let args = self.linear_args(x, self.weights + matrix.tiles, strips, inputs, (out, self.panel_rows()));
        let args = PrefillLinearArgs { scales: self.weights + matrix.scales, ..args };
        step(operation, layer, self.products.swiglu(self.format, &args), Args::PrefillLinear(args))
    }

    /// q, k and v of a layer, as projected.
    pub fn qkv(&self, index: usize, layer: &FastLayer) -> Step {
        let (b, config) = (&self.buffers, &self.plan.config);
        let (d, qkv) = (config.hidden_size, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim);
        self.linear(Operation::Qkv, index, (b.normed, d), layer.qkv, (b.qkv, qkv))
    }

    /// A layer up to its keys and values.
    fn keys(&self, index: usize, layer: &FastLayer, cache: &LayerCache, tiles: &[PrefillTile], steps: &mut Vec<Step>) {
        let (b, config, w) = (&self.buffers, &self.plan.config, self.weights);
        steps.push(self.qkv(index, layer));
        let args = PrefillKvArgs {
            qkv: b.qkv,
            kv: cache.kv,
            blocks: cache.blocks,
            tiles: self.inputs.tiles,
            q_norm: w + layer.q_norm,
            k_norm: w + layer.k_norm,
            inv_freq: cache.inv_freq,
            block_stride: cache.block_stride,
            table_stride: self.shared.table_stride as u32,
            eps: config.rms_norm_eps,
        };
        let launch = prefill_kv_launch(config.n_kv_heads as u32, tiles).expect(FITS);
        steps.push(step(Operation::QkvFinish, index, (PREFILL_KV, launch), Args::PrefillKv(args)));
    }

    fn attention(
        &self,
        index: usize,
        layer: &FastLayer,
        cache: &LayerCache,
        tiles: &[PrefillTile],
        steps: &mut Vec<Step>,
    ) {
        let (b, config, w) = (&self.buffers, &self.plan.config, self.weights);
        let kv_heads = config.n_kv_heads;
        let args = PrefillAttentionArgs {
            qkv: b.qkv,
            kv: cache.kv,
            blocks: cache.blocks,
            tiles: self.inputs.tiles,
            sinks: w + layer.sinks,
            attn: b.attn,
            counter: b.counter,
            block_stride: cache.block_stride,
            table_stride: self.shared.table_stride as u32,
            panel_rows: self.panel_rows() as u32,
            window: cache.window.unwrap_or(0),
            n_tiles: tiles.len() as u32,
            n_kv_heads: kv_heads as u32,
            reserved: 0,
        };
        let attention = PrefillAttention::of((self.plan.card.major, 0), self.plan.card.processors as u32);
        let launch = attention.launch(kv_heads as u32, cache.window, tiles).expect(FITS);
        steps.push(step(Operation::Attention, index, (attention.kernel(), launch), Args::PrefillAttention(args)));
        steps.push(self.output(index, layer));
    }

    /// Attention's output projection.
    pub fn output(&self, index: usize, layer: &FastLayer) -> Step {
        let (b, config) = (&self.buffers, &self.plan.config);
        let (d, heads) = (config.hidden_size, config.n_heads * config.head_dim);
        self.linear(Operation::Output, index, (b.attn, heads), layer.output, (b.delta, d))
    }

    /// What is behind a layer's attention, and the norm `next`.
    pub fn mlp(&self, index: usize, layer: &FastLayer, next: Option<Norm>, steps: &mut Vec<Step>) {
        let (b, config) = (&self.buffers, &self.plan.config);
        let d = config.hidden_size;
        steps.push(self.norm(Norm { layer: index, weight: layer.mlp_norm }));
        match &layer.mlp {
            FastMlp::Dense { up, down } => {
                let width = config.dense_intermediate_size;
                steps.push(self.swiglu(Operation::DenseUp, index, *up, b.act_dense, width));
                steps.push(self.linear(Operation::DenseDown, index, (b.act_dense, width), *down, (b.delta, d)));
                steps.extend(next.map(|norm| self.norm(norm)));
            }
            FastMlp::Moe(moe) => {
                self.moe(index, moe, steps);
                steps.push(self.combine(index, next));
            }
        }
    }

    fn moe(&self, index: usize, layer: &FastMoe, steps: &mut Vec<Step>) {
        let FastMoe { router_parts, shared_up, up, down, shared_down, shared_down_scale, .. } = layer;
        let (b, config, w, format) = (&self.buffers, &self.plan.config, self.weights, self.format);
        let (d, shared) = (config.hidden_size, config.shared_intermediate_size);

        // Below each other, so that more multiprocessors have a unit; the choice adds their logits.
        let parts = PARTS * EXPERTS;
        let args = self.linear_args(b.normed, w + router_parts, parts / TILE_ROWS, d, (b.router_logits, parts));
        let launch = self.products.logits(TileFormat::Bf16, &args);
        steps.push(step(Operation::Router, index, launch, Args::PrefillLinear(args)));
        let args = PrefillRouteArgs {
            logits: b.router_logits,
            experts: b.chosen,
            weights: b.chosen_weights,
            masks: b.masks,
            rows: self.rows as u32,
            reserved: 0,
        };
        let launch = (PREFILL_ROUTE, prefill_route_launch(self.rows));
        steps.push(step(Operation::Choose, index, launch, Args::PrefillRoute(args)));
        self.sort(index, steps);
        let together = self.products.experts_share(self.rows);
        let up = PrefillExpertsArgs {
            x: b.sorted_rows,
            weights: w + up.tiles,
            scales: w + up.scales,
            out: b.act,
            tiles: b.expert_tiles,
            n_tiles: b.n_expert_tiles,
            sorted_rows: prefill::sorted_rows(self.rows) as u32,
            shared_rows: if together { self.rows as u32 } else { 0 },
            shared_x: b.normed,
            shared_weights: w + shared_up.tiles,
            shared_scales: w + shared_up.scales,
            shared_out: b.act_shared,
            panel_rows: self.panel_rows() as u32,
            shared_scale: 0.0,
            counter: b.counter,
        };
        let down = PrefillExpertsArgs {
            x: b.act,
            weights: w + down.tiles,
            scales: w + down.scales,
            out: b.sorted_rows,
            shared_x: b.act_shared,
            shared_weights: w + shared_down,
            shared_scales: 0,
            shared_out: b.shared,
            shared_scale: *shared_down_scale,
            ..up
        };
        let launch = self.products.experts_up(format, self.rows);
        steps.push(step(Operation::ExpertsUp, index, launch, Args::PrefillExperts(up)));
        let launch = self.products.experts_down(format, self.rows);
        steps.push(step(Operation::ExpertsDown, index, launch, Args::PrefillExperts(down)));
        if !together {
            steps.push(self.swiglu(Operation::SharedUp, index, *shared_up, b.act_shared, shared));
            let args = self.linear_args(b.act_shared, w + shared_down, d / TILE_ROWS, shared, (b.shared, d));
            let args = PrefillLinearArgs { scale: *shared_down_scale, ..args };
            let launch = self.products.linear(format, &args);
            steps.push(step(Operation::SharedDown, index, launch, Args::PrefillLinear(args)));
        }
    }

    /// The tokens' rows in the order of their experts, and the tiles over them.
    fn sort(&self, index: usize, steps: &mut Vec<Step>) {
        let b = &self.buffers;
        let (rows, panel_rows) = (self.rows as u32, self.panel_rows() as u32);
        let sorted_rows = prefill::sorted_rows(self.rows) as u32;
        let most_columns = self.products.expert_columns(self.rows);
        let args = PrefillGroupArgs {
            masks: b.masks,
            places: b.places,
            tiles: b.expert_tiles,
            n_tiles: b.n_expert_tiles,
            rows,
            most_columns,
        };
        let launch = (PREFILL_GROUP, prefill_group_launch(self.rows));
        steps.push(step(Operation::Group, index, launch, Args::PrefillGroup(args)));
        let args = PrefillGatherArgs {
            x: b.normed,
            experts: b.chosen,
            masks: b.masks,
            places: b.places,
            sorted: b.sorted,
            out: b.sorted_rows,
            rows,
            panel_rows,
            sorted_rows,
            reserved: 0,
        };
        steps.push(step(Operation::Gather, index, prefill_gather_launch(self.rows), Args::PrefillGather(args)));
    }

    /// The output of a MoE layer, and the norm `next` of it.
    fn combine(&self, index: usize, next: Option<Norm>) -> Step {
        let b = &self.buffers;
        let rows = self.rows as u32;
        let Some(norm) = next else {
            let args = PrefillCombineArgs {
                y: b.sorted_rows,
                sorted: b.sorted,
                weights: b.chosen_weights,
                shared: b.shared,
                delta: b.delta,
                rows,
                reserved: 0,
            };
            let launch = (PREFILL_COMBINE, prefill_combine_launch(self.rows));
            return step(Operation::Combine, index, launch, Args::PrefillCombine(args));
        };
        let args = PrefillCombineNormArgs {
            y: b.sorted_rows,
            sorted: b.sorted,
            weights: b.chosen_weights,
            shared: b.shared,
            residual: b.residual,
            norm_weight: self.weights + norm.weight,
            normed: b.normed,
            rows,
            panel_rows: self.panel_rows() as u32,
            eps: self.plan.config.rms_norm_eps,
            reserved: 0,
        };
        let launch = (PREFILL_COMBINE_NORM, prefill_combine_norm_launch(self.rows));
        step(Operation::Combine, index, launch, Args::PrefillCombineNorm(args))
    }

    /// `[rows, V]` f32 at `out`, behind the final norm.
    pub fn logits(&self, weights: &FastWeights, out: u64) -> Step {
        let (b, config, w) = (&self.buffers, &self.plan.config, self.weights);
        let (index, vocab, d) = (weights.layers.len(), config.vocab_size, config.hidden_size);
        let args = self.linear_args(b.normed, w + weights.lm_head.tiles, vocab / TILE_ROWS, d, (out, vocab));
        let args = PrefillLinearArgs { scales: w + weights.lm_head.scales, ..args };
        let launch = self.products.logits(self.format, &args);
        step(Operation::LmHead, index, launch, Args::PrefillLinear(args))
    }
}
