//! Feed-forward parts. A dense layer is a shared expert without routed ones.

use super::{
    Engine,
    gemm::{Packed, Workspace},
    gemv::task_rows,
    parallel::{self, Disjoint},
    simd::{Arranged, TILE_COLS, TILE_ROWS},
};
use crate::{
    cancel::Cancel,
    cpu::{Precision, reference::Routes},
    error::Result,
    weights::SwiGlu,
};

/// Tokens that go through one `SwiGlu`.
struct Batch<'a> {
    weights: &'a SwiGlu,
    /// Token and routing weight.
    tokens: Vec<(usize, f32)>,
}

/// The experts that some token chose, in index order, then the shared one with every token.
fn batches<'a>(experts: &'a [SwiGlu], shared: &'a SwiGlu, routes: &Routes, n_tokens: usize) -> Vec<Batch<'a>> {
    let mut tokens = vec![Vec::new(); experts.len()];
    for t in 0..n_tokens {
        for (expert, weight) in routes.of(t) {
            tokens[expert].push((t, weight));
        }
    }
    let mut batches: Vec<Batch<'_>> =
        experts.iter().zip(tokens).map(|(weights, tokens)| Batch { weights, tokens }).collect();
    batches.retain(|batch| !batch.tokens.is_empty());
    batches.push(Batch { weights: shared, tokens: (0..n_tokens).map(|t| (t, 1.0)).collect() });
    batches
}

impl Engine {
    /// [`crate::cpu::reference::moe`] of `x`, `[T, D]`.
    pub(super) fn feed_forward(
        &self,
        experts: &[SwiGlu],
        shared: &SwiGlu,
        routes: &Routes,
        x: &[f32],
        precision: Precision,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let d = shared.down.rows;
        let n_tokens = x.len() / d;
        let batches = batches(experts, shared, routes, n_tokens);
        if n_tokens == 1 {
            let acts = self.acts_one(&batches, &self.isa.arrange(x), precision, cancel)?;
            return self.down_one(&batches, &acts, precision, cancel);
        }
        let acts = self.acts(&batches, x, precision, cancel)?;
        self.down(&batches, &acts, n_tokens, precision, cancel)
    }

    /// The inner activations of each batch for one token.
    fn acts_one(
        &self,
        batches: &[Batch<'_>],
        x: &Arranged,
        precision: Precision,
        cancel: &Cancel,
    ) -> Result<Vec<Arranged>> {
        let mut acts: Vec<Vec<f32>> = batches.iter().map(|batch| vec![0.0; batch.weights.gate.rows]).collect();
        let views: Vec<Disjoint<'_>> = acts.iter_mut().map(|act| Disjoint::new(act)).collect();
        let mut tasks = Vec::new();
        for (i, batch) in batches.iter().enumerate() {
            let (rows, step) = (batch.weights.gate.rows, task_rows(&batch.weights.gate));
            tasks.extend((0..rows).step_by(step).map(|row| (i, row..(row + step).min(rows))));
        }
        parallel::for_each(tasks.len(), cancel, Vec::new, |ups, task| {
            let (i, range) = &tasks[task];
            let SwiGlu { gate, up, .. } = batches[*i].weights;
            // SAFETY: no two tasks have a row of a batch in common.
            let gates = unsafe { views[*i].slice(range.clone()) };
            ups.clear();
            for (out, row) in gates.iter_mut().zip(range.clone()) {
                *out = self.row_product(gate, row, x);
                ups.push(self.row_product(up, row, x));
            }
            self.isa.silu_mul(gates, 1.0, ups, 1.0, precision);
        })?;
        Ok(acts.iter().map(|act| self.isa.arrange(act)).collect())
    }

    /// The output for one token.
    fn down_one(
        &self,
        batches: &[Batch<'_>],
        acts: &[Arranged],
        precision: Precision,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let shared = &batches[batches.len() - 1].weights.down;
        let mut out = vec![0.0; shared.rows];
        let step = task_rows(shared).div_ceil(batches.len());
        let tasks = out.len().div_ceil(step);
        let (n, view) = (out.len(), Disjoint::new(&mut out));
        parallel::for_each(
            tasks,
            cancel,
            || (),
            |(), task| {
                let range = task * step..n.min((task + 1) * step);
                // SAFETY: each task has its own rows.
                let out = unsafe { view.slice(range.clone()) };
                for (out, row) in out.iter_mut().zip(range) {
                    let mut products = batches
                        .iter()
                        .zip(acts)
                        .map(|(batch, act)| precision.round(self.row_product(&batch.weights.down, row, act)));
                    let routed: f32 = batches[..batches.len() - 1]
                        .iter()
                        .zip(&mut products)
                        .map(|(batch, product)| batch.tokens[0].1 * product)
                        .sum();
                    *out = precision.round(precision.round(routed) + products.next().unwrap_or(0.0));
                }
            },
        )?;
        Ok(out)
    }

    /// The inner activations of each batch, as the left side of [`Engine::down`].
    fn acts(&self, batches: &[Batch<'_>], x: &[f32], precision: Precision, cancel: &Cancel) -> Result<Vec<Packed>> {
        let mut inputs = Vec::new();
        for batch in batches {
            let d = batch.weights.gate.cols;
            let row = |i: usize| &x[batch.tokens[i].0 * d..(batch.tokens[i].0 + 1) * d];
            inputs.push(Packed::new(batch.tokens.len(), d, row, cancel)?);
        }
        let mut acts: Vec<Packed> =
            batches.iter().map(|batch| Packed::zeros(batch.tokens.len(), batch.weights.gate.rows)).collect();
        let views: Vec<Disjoint<'_>> = acts.iter_mut().map(|act| Disjoint::new(act.values_mut())).collect();
        let mut tasks = Vec::new();
        for (i, batch) in batches.iter().enumerate() {
            tasks.extend((0..batch.weights.gate.rows).step_by(TILE_COLS).map(|first| (i, first)));
        }
        let workspace = || (Workspace::new(), Vec::new(), Vec::new());
        parallel::for_each(tasks.len(), cancel, workspace, |(workspace, gates, ups), task| {
            let (i, first) = tasks[task];
            let SwiGlu { gate, up, .. } = batches[i].weights;
            let n_tokens = batches[i].tokens.len();
            gates.resize(n_tokens * TILE_COLS, 0.0);
            ups.resize(n_tokens * TILE_COLS, 0.0);
            workspace.multiply(self.isa, gate, first, &inputs[i], gates);
            workspace.multiply(self.isa, up, first, &inputs[i], ups);
            self.isa.silu_mul(gates, gate.scale(), ups, up.scale(), precision);
            let n = TILE_COLS.min(gate.rows - first);
            for (tile, gates) in gates.chunks(TILE_ROWS * TILE_COLS).enumerate() {
                // SAFETY: each task has its own columns of a batch.
                let out = unsafe { views[i].slice(Packed::range(gate.rows, tile, first, n)) };
                for (row, gates) in gates.chunks_exact(TILE_COLS).enumerate() {
                    for (out, x) in out.chunks_exact_mut(TILE_ROWS).zip(gates) {
                        out[row] = *x;
                    }
                }
            }
        })?;
        Ok(acts)
    }

    /// round(round(sum of weight * round(down act)) + round(shared down act)), `[T, D]`. A task owns 16 columns of every token,
    /// so that the sum over experts has one order.
    fn down(
        &self,
        batches: &[Batch<'_>],
        acts: &[Packed],
        n_tokens: usize,
        precision: Precision,
        cancel: &Cancel,
    ) -> Result<Vec<f32>> {
        let d = batches[0].weights.down.rows;
        let mut out = vec![0.0; n_tokens * d];
        let view = Disjoint::new(&mut out);
        let workspace = || (Workspace::new(), vec![0.0; n_tokens * TILE_COLS], vec![0.0; n_tokens * TILE_COLS]);
        parallel::for_each(d.div_ceil(TILE_COLS), cancel, workspace, |(workspace, products, routed), task| {
            let first = task * TILE_COLS;
            routed.fill(0.0);
            for (i, (batch, act)) in batches.iter().zip(acts).enumerate() {
                let down = &batch.weights.down;
                let products = &mut products[..batch.tokens.len() * TILE_COLS];
                workspace.multiply(self.isa, down, first, act, products);
                let is_shared = i + 1 == batches.len();
                for (products, &(t, weight)) in products.chunks_exact(TILE_COLS).zip(&batch.tokens) {
                    for (routed, product) in routed[t * TILE_COLS..(t + 1) * TILE_COLS].iter_mut().zip(products) {
                        let y = precision.round(product * down.scale());
                        *routed = if is_shared {
                            precision.round(precision.round(*routed) + y)
                        } else {
                            *routed + weight * y
                        };
                    }
                }
            }
            let n = TILE_COLS.min(d - first);
            for (t, routed) in routed.chunks_exact(TILE_COLS).enumerate() {
                // SAFETY: each task has its own columns.
                unsafe { view.slice(t * d + first..t * d + first + n) }.copy_from_slice(&routed[..n]);
            }
        })?;
        Ok(out)
    }
}
