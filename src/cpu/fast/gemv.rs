//! Products with one token: packed rows are read once, split over the threads.

use super::{
    Engine,
    parallel::{self, Disjoint},
    simd::Arranged,
};
use crate::{cancel::Cancel, cpu::Precision, error::Result, weights::Matrix};

/// Packed bytes of a task: a few microseconds, so that the last one to end is not waited for long.
const TASK_BYTES: usize = 32 * 1024;

impl Engine {
    /// [`crate::cpu::reference::project`] of one token by several matrices: an `[N]` for each.
    pub(super) fn gemv(
        &self,
        matrices: &[&Matrix],
        x: &Arranged,
        precision: Precision,
        cancel: &Cancel,
    ) -> Result<Vec<Vec<f32>>> {
        let mut outs: Vec<Vec<f32>> = matrices.iter().map(|matrix| vec![0.0; matrix.rows]).collect();
        let views: Vec<Disjoint<'_>> = outs.iter_mut().map(|out| Disjoint::new(out)).collect();
        let mut tasks = Vec::new();
        for (i, matrix) in matrices.iter().enumerate() {
            let step = task_rows(matrix);
            tasks.extend((0..matrix.rows).step_by(step).map(|row| (i, row..(row + step).min(matrix.rows))));
        }
        parallel::for_each(
            tasks.len(),
            cancel,
            || (),
            |(), task| {
                let (i, range) = &tasks[task];
                // SAFETY: no two tasks have a row of a matrix in common.
                let out = unsafe { views[*i].slice(range.clone()) };
                for (out, row) in out.iter_mut().zip(range.clone()) {
                    *out = precision.round(self.row_product(matrices[*i], row, x));
                }
            },
        )?;
        Ok(outs)
    }

    /// One row of a matrix times `x`, in fp32.
    pub(super) fn row_product(&self, matrix: &Matrix, row: usize, x: &Arranged) -> f32 {
        self.isa.dot(matrix.data.dtype(), matrix.row(row), x) * matrix.scale()
    }
}

/// Rows of `matrix` that make a task.
pub(super) fn task_rows(matrix: &Matrix) -> usize {
    (TASK_BYTES / matrix.row_bytes()).max(1)
}
