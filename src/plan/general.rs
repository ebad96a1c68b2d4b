//! The general path: any dimensions, matrices as the file has them; where its weights lie, and its launches.

use super::{Bases, Buffers, Ending, LayerCache, Operation, Plan, Space, Step, Types};
use crate::{
    checkpoint::DType,
    config::{FlintConfig, Mlp},
    error::{Error, Result},
    kernels::{
        Args, GENERAL_ATTENTION, GENERAL_EMBED, GENERAL_EXPERTS_DOWN, GENERAL_MAX_CHOSEN, GENERAL_MAX_EXPERTS,
        GENERAL_MAX_HEAD_DIM, GENERAL_NORM, GENERAL_PROJECT, GENERAL_QKV_FINISH, GENERAL_ROUTER, GENERAL_SWIGLU,
        GeneralAttentionArgs, GeneralEmbedArgs, GeneralExpertsDownArgs, GeneralMatrix, GeneralNormArgs,
        GeneralProjectArgs, GeneralQkvFinishArgs, GeneralRouterArgs, GeneralSwigluArgs,
    },
};

/// A matrix, or the stack of a layer's experts, as the file has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored {
    /// Offset of the first matrix; the others follow it.
    pub data: u64,
    /// Offset of `[n]` f32, the factor of each.
    pub scales: u64,
    /// Matrices.
    pub n: usize,
    /// Outputs of each.
    pub rows: usize,
    /// Inputs of each.
    pub cols: usize,
    /// Their type.
    pub dtype: DType,
}

/// Offsets of the weights of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneralLayer {
    /// `[D]` f32.
    pub attn_norm: u64,
    /// `[H head_dim, D]`.
    pub q: Stored,
    /// `[G head_dim, D]`.
    pub k: Stored,
    /// `[G head_dim, D]`.
    pub v: Stored,
    /// `[D, H head_dim]`.
    pub output: Stored,
    /// `[head_dim]` f32.
    pub q_norm: u64,
    /// `[head_dim]` f32.
    pub k_norm: u64,
    /// `[H]` f32.
    pub sinks: u64,
    /// `[D]` f32.
    pub mlp_norm: u64,
    /// The feed-forward part.
    pub mlp: GeneralMlp,
}

/// Offsets of the feed-forward part; gate, up, down each.
#[derive(Clone, Debug, PartialEq)]
pub enum GeneralMlp {
    /// A dense layer.
    Dense([Stored; 3]),
    /// A mixture of experts.
    Moe {
        /// `[E, D]`.
        router: Stored,
        /// Stacks of E.
        experts: [Stored; 3],
        /// The shared expert.
        shared: [Stored; 3],
    },
}

/// Offsets of all weights in one allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneralWeights {
    /// `[V, D]`.
    pub embedding: Stored,
    /// One a layer.
    pub layers: Vec<GeneralLayer>,
    /// `[D]` f32.
    pub final_norm: u64,
    /// `[V, D]`.
    pub lm_head: Stored,
    /// All of it.
    pub bytes: usize,
}

impl GeneralWeights {
    /// Errors: [`Error::Unavailable`] for a model that these kernels do not run.
    pub(super) fn new(config: &FlintConfig, types: &Types) -> Result<Self> {
        let unavailable = |why| Error::Unavailable { what: "device cuda for this model".into(), why };
        for (name, found, most) in [
            ("head_dim", config.head_dim, GENERAL_MAX_HEAD_DIM),
            ("n_experts", config.n_experts, GENERAL_MAX_EXPERTS),
            ("n_experts_per_token", config.n_experts_per_token, GENERAL_MAX_CHOSEN),
        ] {
            if found > most as usize {
                return Err(unavailable(format!("{name} is {found}, its kernels take at most {most}")));
            }
        }
        let mut space = Space::default();
        let mut stack = |name: &str, n: usize, rows: usize, cols: usize| {
            let dtype = types.get(name).ok_or_else(|| unavailable(format!("{name} has experts of several types")))?;
            let bytes = dtype.bytes_of(&[n, rows, cols]).ok_or_else(|| unavailable(format!("{name} is no {dtype}")))?;
            Ok::<_, Error>(Stored { data: space.take(bytes), scales: space.take(4 * n), n, rows, cols, dtype })
        };
        let (d, hd, v) = (config.hidden_size, config.head_dim, config.vocab_size);
        let (q, kv) = (config.n_heads * hd, config.n_kv_heads * hd);
        let embedding = stack("token_embd.weight", 1, v, d)?;
        let lm_head = stack("output.weight", 1, v, d)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (index, kind) in config.layers.iter().enumerate() {
            let mut stack = |part: &str, n, rows, cols| stack(&format!("blk.{index}.{part}.weight"), n, rows, cols);
            let mut swiglu = |suffix: &str, n: usize, f: usize| {
                Ok::<_, Error>([
                    stack(&format!("ffn_gate{suffix}"), n, f, d)?,
                    stack(&format!("ffn_up{suffix}"), n, f, d)?,
                    stack(&format!("ffn_down{suffix}"), n, d, f)?,
                ])
            };
            let mlp = match kind.mlp {
                Mlp::Dense => GeneralMlp::Dense(swiglu("", 1, config.dense_intermediate_size)?),
                Mlp::Moe => {
                    let experts = swiglu("_exps", config.n_experts, config.expert_intermediate_size)?;
                    let shared = swiglu("_shexp", 1, config.shared_intermediate_size)?;
                    GeneralMlp::Moe { router: stack("ffn_gate_inp", 1, config.n_experts, d)?, experts, shared }
                }
            };
            layers.push(GeneralLayer {
                q: stack("attn_q", 1, q, d)?,
                k: stack("attn_k", 1, kv, d)?,
                v: stack("attn_v", 1, kv, d)?,
                output: stack("attn_output", 1, d, q)?,
                mlp,
                attn_norm: 0,
                q_norm: 0,
                k_norm: 0,
                sinks: 0,
                mlp_norm: 0,
            });
        }
        for layer in &mut layers {
            layer.attn_norm = space.take(4 * d);
            layer.q_norm = space.take(4 * hd);
            layer.k_norm = space.take(4 * hd);
            layer.sinks = space.take(4 * config.n_heads);
            layer.mlp_norm = space.take(4 * d);
        }
        let final_norm = space.take(4 * d);
        Ok(Self { embedding, layers, final_norm, lm_head, bytes: space.bytes() })
    }
}

/// The launches of a step without its sampler, see [`Plan::steps`].
pub(super) fn steps(
    plan: &Plan,
    weights: &GeneralWeights,
    bases: &Bases,
    positions: &[u32],
    ending: Ending,
) -> Vec<Step> {
    let buffers = plan.buffers.at(bases.buffers);
    let builder = Builder { plan, weights: bases.weights, buffers, slots: 0, positions };
    let mut steps = builder.layers(weights, bases, true);
    if ending != Ending::Nothing {
        steps.extend(builder.logits(weights));
    }
    steps
}

/// The launches of a chunk, see [`Plan::chunk_steps`].
pub(super) fn chunk_steps(
    plan: &Plan,
    weights: &GeneralWeights,
    bases: &Bases,
    positions: &[u32],
    logits: bool,
) -> Vec<Step> {
    let inputs = plan.chunk.inputs.at(bases.buffers);
    let buffers = Buffers { tokens: inputs.tokens, positions: inputs.positions, ..plan.buffers.at(bases.buffers) };
    let builder = Builder { plan, weights: bases.weights, buffers, slots: inputs.slots, positions };
    builder.layers(weights, bases, logits)
}

/// The launches behind a chunk for the logits of `rows` of its tokens from `first` on, see [`Plan::logits_steps`].
pub(super) fn logits_steps(
    plan: &Plan,
    weights: &GeneralWeights,
    bases: &Bases,
    first: usize,
    rows: usize,
) -> Vec<Step> {
    let mut buffers = plan.buffers.at(bases.buffers);
    for rows in [&mut buffers.delta, &mut buffers.residual, &mut buffers.residual_mid] {
        *rows += (2 * first * plan.config.hidden_size) as u64;
    }
    Builder { plan, weights: bases.weights, buffers, slots: 0, positions: &vec![0; rows] }.logits(weights).into()
}

/// Where a projection writes.
#[derive(Clone, Copy)]
struct Out {
    address: u64,
    stride: usize,
    offset: usize,
    f32: bool,
}

struct Builder<'a> {
    plan: &'a Plan,
    weights: u64,
    buffers: Buffers,
    /// `[B]` u32, the row of the block tables of each token, or 0: its own.
    slots: u64,
    positions: &'a [u32],
}

impl Builder<'_> {
    /// All layers; without `whole` the last only up to its keys and values.
    fn layers(&self, weights: &GeneralWeights, bases: &Bases, whole: bool) -> Vec<Step> {
        let mut steps = vec![self.embed(&weights.embedding)];
        for (index, (layer, cache)) in weights.layers.iter().zip(self.plan.cache(bases)).enumerate() {
            self.keys(index, layer, &cache, &mut steps);
            if whole || index + 1 < weights.layers.len() {
                self.attention(index, layer, &cache, &mut steps);
                self.mlp(index, layer, &mut steps);
            }
        }
        steps
    }

    fn logits(&self, weights: &GeneralWeights) -> [Step; 2] {
        let (n_layers, b) = (weights.layers.len(), &self.buffers);
        let logits = Out { address: b.logits, stride: self.plan.config.vocab_size, offset: 0, f32: true };
        [
            self.norm(n_layers, weights.final_norm, b.residual, b.residual_mid),
            self.project(Operation::LmHead, n_layers, &weights.lm_head, b.normed, logits),
        ]
    }

    fn rows(&self) -> u32 {
        self.positions.len() as u32
    }

    fn matrix(&self, stored: &Stored) -> GeneralMatrix {
        let (data, scales) = (self.weights + stored.data, self.weights + stored.scales);
        GeneralMatrix::new(data, scales, stored.dtype, stored.rows, stored.cols)
            .expect("types and row lengths of a checkpoint were checked, and a row has at most 2^20 values")
    }

    fn embed(&self, table: &Stored) -> Step {
        let args = GeneralEmbedArgs {
            table: self.matrix(table),
            tokens: self.buffers.tokens,
            delta: self.buffers.delta,
            residual: self.buffers.residual,
            cols: table.cols as u32,
            reserved: 0,
        };
        let launch = args.launch(self.rows());
        Step { operation: Operation::Embed, layer: 0, kernel: GENERAL_EMBED, launch, args: Args::GeneralEmbed(args) }
    }

    fn norm(&self, layer: usize, weight: u64, residual_in: u64, residual_out: u64) -> Step {
        let args = GeneralNormArgs {
            delta: self.buffers.delta,
            residual_in,
            weight: self.weights + weight,
            residual_out,
            normed: self.buffers.normed,
            cols: self.plan.config.hidden_size as u32,
            eps: self.plan.config.rms_norm_eps,
        };
        let launch = args.launch(self.rows());
        Step { operation: Operation::Norm, layer, kernel: GENERAL_NORM, launch, args: Args::GeneralNorm(args) }
    }

    fn project(&self, operation: Operation, layer: usize, matrix: &Stored, x: u64, out: Out) -> Step {
        let args = GeneralProjectArgs {
            matrix: self.matrix(matrix),
            x,
            out: out.address,
            rows: matrix.rows as u32,
            cols: matrix.cols as u32,
            out_stride: out.stride as u32,
            offset: out.offset as u32,
            n: self.rows(),
            f32: out.f32.into(),
        };
        Step { operation, layer, kernel: GENERAL_PROJECT, launch: args.launch(), args: Args::GeneralProject(args) }
    }

    /// A projection to `delta`.
    fn project_to_delta(&self, operation: Operation, layer: usize, matrix: &Stored, x: u64) -> Step {
        let out = Out { address: self.buffers.delta, stride: matrix.rows, offset: 0, f32: false };
        self.project(operation, layer, matrix, x, out)
    }

    /// A layer up to its keys and values.
    fn keys(&self, index: usize, layer: &GeneralLayer, cache: &LayerCache, steps: &mut Vec<Step>) {
        let (b, config) = (&self.buffers, &self.plan.config);
        steps.push(self.norm(index, layer.attn_norm, b.residual, b.residual_mid));
        let stride = layer.q.rows + layer.k.rows + layer.v.rows;
        let mut offset = 0;
        for matrix in [&layer.q, &layer.k, &layer.v] {
            let out = Out { address: b.qkv, stride, offset, f32: false };
            steps.push(self.project(Operation::Qkv, index, matrix, b.normed, out));
            offset += matrix.rows;
        }
        let args = GeneralQkvFinishArgs {
            qkv: b.qkv,
            kv: cache.kv,
            blocks: cache.blocks,
            positions: b.positions,
            q_norm: self.weights + layer.q_norm,
            k_norm: self.weights + layer.k_norm,
            inv_freq: cache.inv_freq,
            slots: self.slots,
            block_stride: cache.block_stride,
            table_stride: b.table_stride as u32,
            n_heads: config.n_heads as u32,
            n_kv_heads: config.n_kv_heads as u32,
            head_dim: config.head_dim as u32,
            eps: config.rms_norm_eps,
            reserved: 0,
        };
        steps.push(Step {
            operation: Operation::QkvFinish,
            layer: index,
            kernel: GENERAL_QKV_FINISH,
            launch: args.launch(self.rows()),
            args: Args::GeneralQkvFinish(args),
        });
    }

    fn attention(&self, index: usize, layer: &GeneralLayer, cache: &LayerCache, steps: &mut Vec<Step>) {
        let (b, config) = (&self.buffers, &self.plan.config);
        let args = GeneralAttentionArgs {
            qkv: b.qkv,
            kv: cache.kv,
            blocks: cache.blocks,
            positions: b.positions,
            sinks: self.weights + layer.sinks,
            attn: b.attn,
            slots: self.slots,
            block_stride: cache.block_stride,
            table_stride: b.table_stride as u32,
            window: cache.window.unwrap_or(0),
            n_heads: config.n_heads as u32,
            n_kv_heads: config.n_kv_heads as u32,
            head_dim: config.head_dim as u32,
            scale: 1.0 / (config.head_dim as f32).sqrt(),
        };
        steps.push(Step {
            operation: Operation::Attention,
            layer: index,
            kernel: GENERAL_ATTENTION,
            launch: args.launch(self.positions),
            args: Args::GeneralAttention(args),
        });
        steps.push(self.project_to_delta(Operation::Output, index, &layer.output, b.attn));
    }

    /// The first half of a `SwiGLU` over `normed`: of single matrices, or of those that `experts` lists for each row.
    fn swiglu(&self, operation: Operation, layer: usize, [gate, up]: [&Stored; 2], experts: u64, act: u64) -> Step {
        let args = GeneralSwigluArgs {
            gate: self.matrix(gate),
            up: self.matrix(up),
            x: self.buffers.normed,
            experts,
            act,
            rows: gate.rows as u32,
            cols: gate.cols as u32,
        };
        let chosen = if experts == 0 { 1 } else { self.plan.config.n_experts_per_token as u32 };
        let launch = args.launch(self.rows(), chosen);
        Step { operation, layer, kernel: GENERAL_SWIGLU, launch, args: Args::GeneralSwiglu(args) }
    }

    fn mlp(&self, index: usize, layer: &GeneralLayer, steps: &mut Vec<Step>) {
        let (b, config) = (&self.buffers, &self.plan.config);
        steps.push(self.norm(index, layer.mlp_norm, b.residual_mid, b.residual));
        match &layer.mlp {
            GeneralMlp::Dense([gate, up, down]) => {
                steps.push(self.swiglu(Operation::DenseUp, index, [gate, up], 0, b.act));
                steps.push(self.project_to_delta(Operation::DenseDown, index, down, b.act));
            }
            GeneralMlp::Moe { router, experts, shared } => {
                let logits = Out { address: b.router_scores, stride: router.rows, offset: 0, f32: true };
                steps.push(self.project(Operation::Router, index, router, b.normed, logits));
                let args = GeneralRouterArgs {
                    logits: b.router_scores,
                    experts: b.chosen,
                    weights: b.chosen_weights,
                    n_experts: config.n_experts as u32,
                    chosen: config.n_experts_per_token as u32,
                };
                steps.push(Step {
                    operation: Operation::Choose,
                    layer: index,
                    kernel: GENERAL_ROUTER,
                    launch: args.launch(self.rows()),
                    args: Args::GeneralRouter(args),
                });
                let [gate, up, down] = experts;
                let [shared_gate, shared_up, shared_down] = shared;
                let shared_pair = [shared_gate, shared_up];
                steps.push(self.swiglu(Operation::ExpertsUp, index, [gate, up], b.chosen, b.act));
                steps.push(self.swiglu(Operation::SharedUp, index, shared_pair, 0, b.act_shared));
                let args = GeneralExpertsDownArgs {
                    experts: self.matrix(down),
                    shared: self.matrix(shared_down),
                    chosen: b.chosen,
                    weights: b.chosen_weights,
                    act: b.act,
                    act_shared: b.act_shared,
                    delta: b.delta,
                    rows: down.rows as u32,
                    cols: down.cols as u32,
                    shared_cols: shared_down.cols as u32,
                    n_chosen: config.n_experts_per_token as u32,
                };
                steps.push(Step {
                    operation: Operation::Down,
                    layer: index,
                    kernel: GENERAL_EXPERTS_DOWN,
                    launch: args.launch(self.rows()),
                    args: Args::GeneralExpertsDown(args),
                });
            }
        }
    }
}
