//! Products with many tokens: 16 rows of weights are expanded to an f32 panel once, and all tokens pass by it.

use super::{
    Engine,
    parallel::{self, Disjoint},
    simd::{Isa, Panel, TILE_COLS, TILE_ROWS, Tile, packed_len},
};
use crate::{cancel::Cancel, cpu::Precision, error::Result, weights::Matrix};

/// Columns of weights that are expanded together, whole blocks of any type: a panel of 16 KiB stays in the first-level cache
/// while the tokens stream by.
const PANEL_DEPTH: usize = 256;

/// Activations as left sides of tiles, `[T / 6, M, 6]`; the places of missing rows are zero and never read.
pub(super) struct Packed {
    values: Vec<f32>,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl Packed {
    /// Room for `rows` rows of `cols` values.
    pub(super) fn zeros(rows: usize, cols: usize) -> Self {
        Self { values: vec![0.0; rows.div_ceil(TILE_ROWS) * TILE_ROWS * cols], rows, cols }
    }

    /// Packs `rows` rows, each given by `row`.
    pub(super) fn new<'a>(
        rows: usize,
        cols: usize,
        row: impl Fn(usize) -> &'a [f32] + Sync,
        cancel: &Cancel,
    ) -> Result<Self> {
        let mut packed = Self::zeros(rows, cols);
        let tile_len = TILE_ROWS * cols;
        let view = Disjoint::new(&mut packed.values);
        parallel::for_each(
            rows.div_ceil(TILE_ROWS),
            cancel,
            || (),
            |(), tile| {
                // SAFETY: each task has its own tile.
                let out = unsafe { view.slice(tile * tile_len..(tile + 1) * tile_len) };
                for (i, r) in (tile * TILE_ROWS..rows.min((tile + 1) * TILE_ROWS)).enumerate() {
                    for (out, x) in out.chunks_exact_mut(TILE_ROWS).zip(row(r)) {
                        out[i] = *x;
                    }
                }
            },
        )?;
        Ok(packed)
    }

    /// To be filled by tasks, see [`Packed::range`].
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Where columns `first .. first + n` of tile `tile` of a packing with `cols` columns lie: `[n, 6]`.
    pub(super) fn range(cols: usize, tile: usize, first: usize, n: usize) -> std::ops::Range<usize> {
        let start = (tile * cols + first) * TILE_ROWS;
        start..start + n * TILE_ROWS
    }

    fn tile(&self, tile: usize, first: usize, n: usize) -> Tile<'_> {
        Tile {
            values: &self.values[Self::range(self.cols, tile, first, n)],
            rows: (self.rows - tile * TILE_ROWS).min(TILE_ROWS),
            row_stride: 1,
            k: n,
            k_stride: TILE_ROWS,
        }
    }
}

/// Memory of a thread for [`Workspace::multiply`].
pub(super) struct Workspace {
    rows: Vec<f32>,
    panel: Vec<f32>,
}

impl Workspace {
    /// Its size in f32 values.
    pub(super) const VALUES: usize = 2 * PANEL_DEPTH * TILE_COLS;

    pub(super) fn new() -> Self {
        Self { rows: vec![0.0; PANEL_DEPTH * TILE_COLS], panel: vec![0.0; PANEL_DEPTH * TILE_COLS] }
    }

    /// c = x W^T for the 16 rows of `matrix` from `first` on (less at its end), without its scale; `c` is `[T, 16]`.
    pub(super) fn multiply(&mut self, isa: Isa, matrix: &Matrix, first: usize, x: &Packed, c: &mut [f32]) {
        c.fill(0.0);
        let n_rows = TILE_COLS.min(matrix.rows - first);
        for k in (0..matrix.cols).step_by(PANEL_DEPTH) {
            let depth = PANEL_DEPTH.min(matrix.cols - k);
            let rows = &mut self.rows[..depth * TILE_COLS];
            for (i, out) in rows.chunks_exact_mut(depth).enumerate() {
                if i < n_rows {
                    let (dtype, bytes) = (matrix.data.dtype(), matrix.row(first + i));
                    isa.decode(dtype, &bytes[packed_len(dtype, k)..packed_len(dtype, k + depth)], out);
                } else {
                    out.fill(0.0);
                }
            }
            let panel = &mut self.panel[..depth * TILE_COLS];
            isa.transpose(rows, panel);
            for (tile, c) in c.chunks_mut(TILE_ROWS * TILE_COLS).enumerate() {
                isa.tile(x.tile(tile, k, depth), Panel { values: panel, k_stride: TILE_COLS }, c, TILE_COLS);
            }
        }
    }
}

impl Engine {
    /// [`crate::cpu::reference::project`] of `x` by several matrices of one width: a `[T, N]` for each.
    pub(super) fn gemm(
        &self,
        matrices: &[&Matrix],
        x: &Packed,
        precision: Precision,
        cancel: &Cancel,
    ) -> Result<Vec<Vec<f32>>> {
        let mut outs: Vec<Vec<f32>> = matrices.iter().map(|matrix| vec![0.0; x.rows * matrix.rows]).collect();
        let views: Vec<Disjoint<'_>> = outs.iter_mut().map(|out| Disjoint::new(out)).collect();
        let mut tasks = Vec::new();
        for (i, matrix) in matrices.iter().enumerate() {
            tasks.extend((0..matrix.rows).step_by(TILE_COLS).map(|first| (i, first)));
        }
        let workspace = || (Workspace::new(), vec![0.0; x.rows * TILE_COLS]);
        parallel::for_each(tasks.len(), cancel, workspace, |(workspace, c), task| {
            let (i, first) = tasks[task];
            let matrix = matrices[i];
            workspace.multiply(self.isa, matrix, first, x, c);
            let n = TILE_COLS.min(matrix.rows - first);
            for (t, c) in c.chunks_exact(TILE_COLS).enumerate() {
                let start = t * matrix.rows + first;
                // SAFETY: each task has its own columns of a matrix.
                let out = unsafe { views[i].slice(start..start + n) };
                for (out, c) in out.iter_mut().zip(c) {
                    *out = precision.round(c * matrix.scale());
                }
            }
        })?;
        Ok(outs)
    }
}
