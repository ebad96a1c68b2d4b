//! The arithmetic of [`super::reference`] on all cores: the same rounding points, other orders of addition. Weights are read
//! packed and never rounded; activations are never quantised.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
mod gemm;
mod gemv;
mod mlp;
mod parallel;
mod portable;
mod simd;

use rayon::ThreadPool;

use self::{
    attention::Args,
    gemm::Packed,
    parallel::Disjoint,
    simd::{Isa, TILE_COLS},
};
use super::{
    BLOCK_TOKENS, Kv, Positions, Precision,
    reference::{self, Routes},
    rope::{Rope, RopeTable},
};
use crate::{
    cancel::Cancel,
    config::{Attention, FlintConfig},
    error::Result,
    threads,
    weights::{Matrix, MlpWeights, Weights},
};

/// Tokens of a task of the operations that work token by token.
const NORM_TOKENS: usize = 16;

/// Threads and instructions.
pub(super) struct Engine {
    pool: ThreadPool,
    isa: Isa,
}

impl Engine {
    /// With `threads` threads, or one a core.
    pub(super) fn new(threads: Option<usize>) -> Result<Self> {
        Self::with_isa(threads, Isa::detect())
    }

    fn with_isa(threads: Option<usize>, isa: Isa) -> Result<Self> {
        Ok(Self { pool: threads::pool(threads)?, isa })
    }

    /// f32 values that the threads hold beside the activations of a block.
    pub(super) fn workspace_values(&self, config: &FlintConfig) -> usize {
        let thread = attention::workspace_values(config) + gemm::Workspace::VALUES + 3 * BLOCK_TOKENS * TILE_COLS;
        self.pool.current_num_threads() * thread
    }

    /// As [`reference::forward_block`].
    #[allow(clippy::too_many_arguments, reason = "those of the reference, which it stands for")]
    pub(super) fn forward_block(
        &self,
        weights: &Weights,
        rope: &Rope,
        precision: Precision,
        kv: &mut Kv,
        tokens: &[u32],
        positions: Positions,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let pass = Pass { engine: self, weights, precision, cancel };
        self.pool.install(|| pass.run(rope, kv, tokens, positions))
    }
}

/// One block's way through the layers.
struct Pass<'a> {
    engine: &'a Engine,
    weights: &'a Weights,
    precision: Precision,
    cancel: &'a Cancel,
}

impl Pass<'_> {
    fn run(&self, rope: &Rope, kv: &mut Kv, tokens: &[u32], positions: Positions) -> Result<Vec<f32>> {
        let d = self.weights.config.hidden_size;
        let end = kv.len + tokens.len();
        let tables: Vec<RopeTable> = (kv.len..end)
            .step_by(NORM_TOKENS)
            .map(|position| rope.table(position..end.min(position + NORM_TOKENS)))
            .collect();
        let mut residual = vec![0.0; tokens.len() * d];
        let mut x = reference::embed(&self.weights.embedding, tokens, self.precision);
        for index in 0..self.weights.layers.len() {
            x = self.layer(index, &tables, kv, &x, &mut residual)?;
        }
        let wanted = match positions {
            Positions::None => return Ok(Vec::new()),
            Positions::Last => (tokens.len() - 1) * d..,
            Positions::All => 0..,
        };
        let x = self.norm(&x[wanted.clone()], &mut residual[wanted], &self.weights.final_norm)?;
        Ok(self.project(&[&self.weights.lm_head], &x, Precision::Float32)?.swap_remove(0))
    }

    fn layer(
        &self,
        index: usize,
        tables: &[RopeTable],
        kv: &mut Kv,
        x: &[f32],
        residual: &mut [f32],
    ) -> Result<Vec<f32>> {
        let config = &self.weights.config;
        let (layer, kind) = (&self.weights.layers[index], config.layers[index]);

        let x = self.norm(x, residual, &layer.attn_norm)?;
        let mut qkv = self.project(&[&layer.q, &layer.k, &layer.v], &x, self.precision)?;
        let tables = kind.rope.then_some(tables);
        self.norm_heads(&mut qkv[0], config.n_heads, &layer.q_norm, tables)?;
        self.norm_heads(&mut qkv[1], config.n_kv_heads, &layer.k_norm, tables)?;
        let start = kv.len;
        kv.layers[index].append(start, &qkv[1], &qkv[2]);
        let args = Args {
            config,
            kv: &kv.layers[index],
            sinks: &layer.sinks,
            window: (kind.attention == Attention::Sliding).then_some(config.sliding_window),
            start,
            precision: self.precision,
        };
        let x = self.engine.attention(&qkv[0], &args, self.cancel)?;
        let x = self.project(&[&layer.o], &x, self.precision)?.swap_remove(0);

        let x = self.norm(&x, residual, &layer.mlp_norm)?;
        let (experts, shared, routes) = match &layer.mlp {
            MlpWeights::Dense(mlp) => (&[][..], mlp, Routes::from_logits(&[], 1, 0)),
            MlpWeights::Moe { router, experts, shared } => {
                let logits = self.project(&[router], &x, Precision::Float32)?;
                let routes = Routes::from_logits(&logits[0], router.rows, config.n_experts_per_token);
                (&experts[..], shared, routes)
            }
        };
        self.engine.feed_forward(experts, shared, &routes, &x, self.precision, self.cancel)
    }

    /// [`reference::project`] by several matrices of one width.
    fn project(&self, matrices: &[&Matrix], x: &[f32], precision: Precision) -> Result<Vec<Vec<f32>>> {
        let cols = matrices[0].cols;
        let rows = x.len() / cols;
        if rows == 1 {
            return self.engine.gemv(matrices, &self.engine.isa.arrange(x), precision, self.cancel);
        }
        let x = Packed::new(rows, cols, |row| &x[row * cols..(row + 1) * cols], self.cancel)?;
        self.engine.gemm(matrices, &x, precision, self.cancel)
    }

    /// [`reference::rms_norm_residual`].
    fn norm(&self, x: &[f32], residual: &mut [f32], weight: &[f32]) -> Result<Vec<f32>> {
        let eps = self.weights.config.rms_norm_eps;
        let mut out = vec![0.0; x.len()];
        let chunk = NORM_TOKENS * weight.len();
        let (out_view, residual_view) = (Disjoint::new(&mut out), Disjoint::new(residual));
        parallel::for_each(
            x.len().div_ceil(chunk),
            self.cancel,
            || (),
            |(), task| {
                let range = task * chunk..x.len().min((task + 1) * chunk);
                // SAFETY: each task has its own tokens.
                let (out, residual) = unsafe { (out_view.slice(range.clone()), residual_view.slice(range.clone())) };
                out.copy_from_slice(&reference::rms_norm_residual(&x[range], residual, weight, eps, self.precision));
            },
        )?;
        Ok(out)
    }

    /// [`reference::qk_norm_rope`] in place.
    fn norm_heads(&self, x: &mut [f32], heads: usize, weight: &[f32], tables: Option<&[RopeTable]>) -> Result<()> {
        let eps = self.weights.config.rms_norm_eps;
        let (n, chunk) = (x.len(), NORM_TOKENS * heads * weight.len());
        let view = Disjoint::new(x);
        parallel::for_each(
            n.div_ceil(chunk),
            self.cancel,
            || (),
            |(), task| {
                // SAFETY: each task has its own tokens.
                let x = unsafe { view.slice(task * chunk..n.min((task + 1) * chunk)) };
                let table = tables.map(|tables| &tables[task]);
                x.copy_from_slice(&reference::qk_norm_rope(x, heads, weight, eps, table, self.precision));
            },
        )
    }
}

#[cfg(test)]
mod tests;
