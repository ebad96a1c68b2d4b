//! `cuda/general_*.cu`: kernels for any dimensions, every matrix type of the files, and any card. Each argument struct knows
//! its launch. They compute the bits of [`crate::cpu::reference`].

use std::mem::offset_of;

use super::{Kernel, Launch, kernel};
use crate::checkpoint::DType;

/// Largest head dimension of [`GENERAL_ATTENTION`].
pub const GENERAL_MAX_HEAD_DIM: u32 = 256;
/// Most experts that [`GENERAL_ROUTER`] chooses from.
pub const GENERAL_MAX_EXPERTS: u32 = 1024;
/// Most experts that it chooses.
pub const GENERAL_MAX_CHOSEN: u32 = 32;

/// Rows of the embedding.
pub const GENERAL_EMBED: Kernel = kernel::<GeneralEmbedArgs>(c"general_embed");
/// Residual add and RMS norm.
pub const GENERAL_NORM: Kernel = kernel::<GeneralNormArgs>(c"general_norm");
/// A product with a matrix.
pub const GENERAL_PROJECT: Kernel = kernel::<GeneralProjectArgs>(c"general_project");
/// Norm and rotation of q and k, and the write of k and v.
pub const GENERAL_QKV_FINISH: Kernel = kernel::<GeneralQkvFinishArgs>(c"general_qkv_finish");
/// Attention over the KV cache.
pub const GENERAL_ATTENTION: Kernel = kernel::<GeneralAttentionArgs>(c"general_attention");
/// The choice of experts.
pub const GENERAL_ROUTER: Kernel = kernel::<GeneralRouterArgs>(c"general_router");
/// The first half of a `SwiGLU`, or of chosen experts.
pub const GENERAL_SWIGLU: Kernel = kernel::<GeneralSwigluArgs>(c"general_swiglu");
/// The second half of chosen experts and of the shared one, and their sum.
pub const GENERAL_EXPERTS_DOWN: Kernel = kernel::<GeneralExpertsDownArgs>(c"general_experts_down");

const THREADS: u32 = 256;
/// Threads of [`GENERAL_EMBED`] and [`GENERAL_PROJECT`].
const HALF_THREADS: u32 = THREADS / 2;
/// Outputs of a thread block: a warp each, or half a warp where it has [`HALF_THREADS`].
const OUTPUTS: u32 = THREADS / 32;
/// Outputs of a thread block of [`GENERAL_EXPERTS_DOWN`].
const DOWN_ROWS: u32 = 2;
/// Rows of x that a thread block of [`GENERAL_PROJECT`] takes.
const PROJECT_ROWS: u32 = 4;

fn launch(grid: [u32; 3], bytes: u64) -> Launch {
    Launch { grid, block: THREADS, shared_bytes: 0, bytes }
}

/// A matrix in the file's layout, or a stack of them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralMatrix {
    /// `[n, rows, cols]` as the file stores them; a multiple of 4.
    pub data: u64,
    /// `[n]` f32, the scale of each matrix; 0 where all are 1.
    pub scales: u64,
    /// Bytes from a matrix to the next.
    pub matrix_stride: u64,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// F32 0, F16 1, BF16 2, `Q8_0` 3, NVFP4 4.
    pub dtype: u32,
}

impl GeneralMatrix {
    /// Matrices `[rows, cols]` of `dtype` at `data`. `None` for a type that is no matrix's, or a row that is no whole
    /// number of blocks or longer than 4 GiB.
    pub fn new(data: u64, scales: u64, dtype: DType, rows: usize, cols: usize) -> Option<Self> {
        let number = match dtype {
            DType::F32 => 0,
            DType::F16 => 1,
            DType::Bf16 => 2,
            DType::Q8_0 => 3,
            DType::Nvfp4 => 4,
            DType::U8 | DType::F8E4m3 => return None,
        };
        let row_bytes = u32::try_from(dtype.bytes_of(&[cols])?).ok()?;
        Some(Self { data, scales, matrix_stride: rows as u64 * u64::from(row_bytes), row_bytes, dtype: number })
    }
}

const _: () = assert!(
    size_of::<GeneralMatrix>() == 32
        && offset_of!(GeneralMatrix, matrix_stride) == 16
        && offset_of!(GeneralMatrix, dtype) == 28
);

/// The argument of [`GENERAL_EMBED`]. Device addresses, as in all structs here; B is 1 to 65,535.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralEmbedArgs {
    /// `[V, cols]`.
    pub table: GeneralMatrix,
    /// `[B]` u32, below V.
    pub tokens: u64,
    /// Out: `[B, cols]` bf16.
    pub delta: u64,
    /// Out: `[B, cols]` bf16, zeros.
    pub residual: u64,
    /// D.
    pub cols: u32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<GeneralEmbedArgs>() == 64
        && offset_of!(GeneralEmbedArgs, tokens) == 32
        && offset_of!(GeneralEmbedArgs, cols) == 56
);

impl GeneralEmbedArgs {
    /// For B = `rows`.
    pub fn launch(&self, rows: u32) -> Launch {
        let bytes = u64::from(rows) * (u64::from(self.table.row_bytes) + 4 * u64::from(self.cols));
        Launch { block: HALF_THREADS, ..launch([self.cols.div_ceil(64 * OUTPUTS), rows, 1], bytes) }
    }
}

/// The argument of [`GENERAL_NORM`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralNormArgs {
    /// `[B, cols]` bf16, to be added to the residual stream.
    pub delta: u64,
    /// `[B, cols]` bf16.
    pub residual_in: u64,
    /// `[cols]` f32.
    pub weight: u64,
    /// Out: `[B, cols]` bf16; another buffer than `residual_in`.
    pub residual_out: u64,
    /// Out: `[B, cols]` bf16.
    pub normed: u64,
    /// D.
    pub cols: u32,
    /// Epsilon.
    pub eps: f32,
}

const _: () = assert!(
    size_of::<GeneralNormArgs>() == 48
        && offset_of!(GeneralNormArgs, weight) == 16
        && offset_of!(GeneralNormArgs, cols) == 40
);

impl GeneralNormArgs {
    /// For B = `rows`.
    pub fn launch(&self, rows: u32) -> Launch {
        launch([rows, 1, 1], u64::from(rows) * 8 * u64::from(self.cols))
    }
}

/// The argument of [`GENERAL_PROJECT`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralProjectArgs {
    /// `[rows, cols]`.
    pub matrix: GeneralMatrix,
    /// `[B, cols]` bf16.
    pub x: u64,
    /// Out: `[B, out_stride]`, of which `rows` values from `offset` on are written.
    pub out: u64,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
    /// Values from a row of `out` to the next.
    pub out_stride: u32,
    /// First value of a row of `out` that is written.
    pub offset: u32,
    /// B.
    pub n: u32,
    /// 1 for f32 outputs, unrounded; 0 for bf16.
    pub f32: u32,
}

const _: () = assert!(
    size_of::<GeneralProjectArgs>() == 72
        && offset_of!(GeneralProjectArgs, x) == 32
        && offset_of!(GeneralProjectArgs, rows) == 48
        && offset_of!(GeneralProjectArgs, n) == 64
);

impl GeneralProjectArgs {
    /// Its launch.
    pub fn launch(&self) -> Launch {
        let (rows, n) = (u64::from(self.rows), u64::from(self.n));
        let out_bytes = if self.f32 == 1 { 4 } else { 2 };
        let bytes = rows * u64::from(self.matrix.row_bytes) + n * (2 * u64::from(self.cols) + out_bytes * rows);
        let grid = [self.rows.div_ceil(OUTPUTS), self.n.div_ceil(PROJECT_ROWS), 1];
        Launch { block: HALF_THREADS, ..launch(grid, bytes) }
    }
}

/// The argument of [`GENERAL_QKV_FINISH`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralQkvFinishArgs {
    /// `[B, (H + 2 G) head_dim]` bf16: q, k and v as projected. q is replaced by its normed and rotated form.
    pub qkv: u64,
    /// The layer's part of block 0, `[2, G, 64 * head_dim]` bf16: see [`crate::kv::PoolLayout`].
    pub kv: u64,
    /// `[slots, table_stride]` u32: the block of positions 64 i to 64 i + 63. The one of the new position is read.
    pub blocks: u64,
    /// `[B]` u32: positions of the new tokens.
    pub positions: u64,
    /// `[head_dim]` f32.
    pub q_norm: u64,
    /// `[head_dim]` f32.
    pub k_norm: u64,
    /// `[head_dim / 2]` f32, or 0 in a layer without rotation.
    pub inv_freq: u64,
    /// `[B]` u32, which row of `blocks` is that of a token's sequence; 0 where each token has its own.
    pub slots: u64,
    /// bf16 values from one block to the next.
    pub block_stride: u64,
    /// Entries of a row of `blocks`.
    pub table_stride: u32,
    /// H.
    pub n_heads: u32,
    /// G.
    pub n_kv_heads: u32,
    /// Values a head, even.
    pub head_dim: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<GeneralQkvFinishArgs>() == 96
        && offset_of!(GeneralQkvFinishArgs, q_norm) == 32
        && offset_of!(GeneralQkvFinishArgs, block_stride) == 64
        && offset_of!(GeneralQkvFinishArgs, head_dim) == 84
);

impl GeneralQkvFinishArgs {
    /// For B = `rows`.
    pub fn launch(&self, rows: u32) -> Launch {
        let heads = self.n_heads + 2 * self.n_kv_heads;
        launch([heads.div_ceil(OUTPUTS), rows, 1], u64::from(rows * heads) * 4 * u64::from(self.head_dim))
    }
}

/// The argument of [`GENERAL_ATTENTION`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralAttentionArgs {
    /// As [`GENERAL_QKV_FINISH`] left it; its q is read.
    pub qkv: u64,
    /// As in [`GeneralQkvFinishArgs`].
    pub kv: u64,
    /// As in [`GeneralQkvFinishArgs`]; the entries of all visible positions are read.
    pub blocks: u64,
    /// `[B]` u32: positions of the new tokens.
    pub positions: u64,
    /// `[H]` f32.
    pub sinks: u64,
    /// Out: `[B, H, head_dim]` bf16.
    pub attn: u64,
    /// As in [`GeneralQkvFinishArgs`].
    pub slots: u64,
    /// bf16 values from one block to the next.
    pub block_stride: u64,
    /// Entries of a row of `blocks`.
    pub table_stride: u32,
    /// Positions that a token sees, itself included; 0 for all.
    pub window: u32,
    /// H.
    pub n_heads: u32,
    /// G, a divisor of H.
    pub n_kv_heads: u32,
    /// Values a head, even, at most [`GENERAL_MAX_HEAD_DIM`].
    pub head_dim: u32,
    /// Factor of q . k: 1 / sqrt(`head_dim`).
    pub scale: f32,
}

const _: () = assert!(
    size_of::<GeneralAttentionArgs>() == 88
        && offset_of!(GeneralAttentionArgs, sinks) == 32
        && offset_of!(GeneralAttentionArgs, block_stride) == 56
        && offset_of!(GeneralAttentionArgs, scale) == 84
);

impl GeneralAttentionArgs {
    /// For new tokens at `positions`, one a row; the shape depends on their number only, `bytes` on their values.
    pub fn launch(&self, positions: &[u32]) -> Launch {
        let seen = |&position: &u32| {
            let all = u64::from(position) + 1;
            if self.window == 0 { all } else { all.min(self.window.into()) }
        };
        let values = 2 * u64::from(self.n_kv_heads) * positions.iter().map(seen).sum::<u64>();
        let rows = positions.len() as u32;
        let bytes = 2 * u64::from(self.head_dim) * (values + 2 * u64::from(rows * self.n_heads));
        launch([self.n_heads, rows, 1], bytes)
    }
}

/// The argument of [`GENERAL_ROUTER`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralRouterArgs {
    /// `[B, E]` f32.
    pub logits: u64,
    /// Out: `[B, K]` u32, ascending by index.
    pub experts: u64,
    /// Out: `[B, K]` f32, adding up to 1.
    pub weights: u64,
    /// E, at most [`GENERAL_MAX_EXPERTS`].
    pub n_experts: u32,
    /// K, at most E and [`GENERAL_MAX_CHOSEN`].
    pub chosen: u32,
}

const _: () = assert!(size_of::<GeneralRouterArgs>() == 32 && offset_of!(GeneralRouterArgs, n_experts) == 24);

impl GeneralRouterArgs {
    /// For B = `rows`.
    pub fn launch(&self, rows: u32) -> Launch {
        let bytes = u64::from(rows) * (4 * u64::from(self.n_experts) + 8 * u64::from(self.chosen));
        Launch { block: 32, ..launch([rows, 1, 1], bytes) }
    }
}

/// The argument of [`GENERAL_SWIGLU`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralSwigluArgs {
    /// `[rows, cols]`, or a stack of E.
    pub gate: GeneralMatrix,
    /// `[rows, cols]`, or a stack of E.
    pub up: GeneralMatrix,
    /// `[B, cols]` bf16.
    pub x: u64,
    /// `[B, K]` u32, which matrix of the stacks; 0 for single matrices, with K = 1.
    pub experts: u64,
    /// Out: `[B, K, rows]` bf16.
    pub act: u64,
    /// F.
    pub rows: u32,
    /// D.
    pub cols: u32,
}

const _: () = assert!(
    size_of::<GeneralSwigluArgs>() == 96
        && offset_of!(GeneralSwigluArgs, x) == 64
        && offset_of!(GeneralSwigluArgs, rows) == 88
);

impl GeneralSwigluArgs {
    /// For B = `n`, K = `chosen`; `bytes` counts each choice's matrices.
    pub fn launch(&self, n: u32, chosen: u32) -> Launch {
        let matrices = u64::from(self.rows) * u64::from(self.gate.row_bytes + self.up.row_bytes);
        let bytes =
            u64::from(n) * (u64::from(chosen) * (matrices + 2 * u64::from(self.rows)) + 2 * u64::from(self.cols));
        launch([self.rows.div_ceil(OUTPUTS), chosen, n], bytes)
    }
}

/// The argument of [`GENERAL_EXPERTS_DOWN`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GeneralExpertsDownArgs {
    /// E x `[rows, cols]`.
    pub experts: GeneralMatrix,
    /// `[rows, shared_cols]`.
    pub shared: GeneralMatrix,
    /// `[B, K]` u32.
    pub chosen: u64,
    /// `[B, K]` f32.
    pub weights: u64,
    /// `[B, K, cols]` bf16.
    pub act: u64,
    /// `[B, shared_cols]` bf16.
    pub act_shared: u64,
    /// Out: `[B, rows]` bf16.
    pub delta: u64,
    /// D.
    pub rows: u32,
    /// F.
    pub cols: u32,
    /// Inner width of the shared expert.
    pub shared_cols: u32,
    /// K.
    pub n_chosen: u32,
}

const _: () = assert!(
    size_of::<GeneralExpertsDownArgs>() == 120
        && offset_of!(GeneralExpertsDownArgs, chosen) == 64
        && offset_of!(GeneralExpertsDownArgs, rows) == 104
);

impl GeneralExpertsDownArgs {
    /// For B = `n`; `bytes` counts each choice's matrix.
    pub fn launch(&self, n: u32) -> Launch {
        let chosen = u64::from(self.n_chosen) * u64::from(self.experts.row_bytes) + u64::from(self.shared.row_bytes);
        let inputs = u64::from(self.n_chosen) * u64::from(self.cols) + u64::from(self.shared_cols);
        let bytes = u64::from(n) * (u64::from(self.rows) * (chosen + 2) + 2 * inputs);
        launch([self.rows.div_ceil(DOWN_ROWS), n, 1], bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(dtype: DType, rows: usize, cols: usize) -> GeneralMatrix {
        GeneralMatrix::new(1 << 20, 0, dtype, rows, cols).unwrap()
    }

    #[test]
    fn rows_are_whole_blocks_of_a_matrix_type() {
        assert_eq!(matrix(DType::Nvfp4, 3, 128).row_bytes, 72);
        assert_eq!(matrix(DType::Nvfp4, 3, 128).matrix_stride, 216);
        assert_eq!(matrix(DType::Q8_0, 1, 96).row_bytes, 102);
        assert_eq!(matrix(DType::Bf16, 1, 75).row_bytes, 150);
        assert!(GeneralMatrix::new(0, 0, DType::Nvfp4, 1, 96).is_none());
        assert!(GeneralMatrix::new(0, 0, DType::U8, 1, 64).is_none());
        assert!(GeneralMatrix::new(0, 0, DType::F32, 1, 1 << 30).is_none());
    }

    #[test]
    fn every_output_has_a_thread_block() {
        for (rows, grid) in [(1, 1), (8, 1), (9, 2), (8192, 1024)] {
            let matrix = matrix(DType::F32, rows as usize, 10);
            let args =
                GeneralProjectArgs { matrix, x: 0, out: 0, rows, cols: 10, out_stride: rows, offset: 0, n: 2, f32: 1 };
            assert_eq!(args.launch().grid, [grid, 1, 1]);
            assert_eq!(args.launch().bytes, u64::from(rows) * 40 + 2 * (20 + 4 * u64::from(rows)));
            let args = GeneralSwigluArgs { gate: matrix, up: matrix, x: 0, experts: 0, act: 0, rows, cols: 10 };
            assert_eq!(args.launch(3, 6).grid, [grid, 6, 3]);
            let args = GeneralExpertsDownArgs {
                experts: matrix,
                shared: matrix,
                chosen: 0,
                weights: 0,
                act: 0,
                act_shared: 0,
                delta: 0,
                rows,
                cols: 10,
                shared_cols: 10,
                n_chosen: 6,
            };
            assert_eq!(args.launch(3).grid, [rows.div_ceil(2), 3, 1]);
        }
        for (cols, grid) in [(1, 1), (512, 1), (513, 2)] {
            let table = matrix(DType::Bf16, 5, cols as usize);
            let args = GeneralEmbedArgs { table, tokens: 0, delta: 0, residual: 0, cols, reserved: 0 };
            assert_eq!(args.launch(4).grid, [grid, 4, 1]);
        }
    }

    #[test]
    fn attention_counts_what_the_window_shows() {
        let mut args = GeneralAttentionArgs {
            qkv: 0,
            kv: 0,
            blocks: 0,
            positions: 0,
            sinks: 0,
            attn: 0,
            slots: 0,
            block_stride: 0,
            table_stride: 1,
            window: 0,
            n_heads: 6,
            n_kv_heads: 3,
            head_dim: 22,
            scale: 1.0,
        };
        assert_eq!(args.launch(&[9, 99]).grid, [6, 2, 1]);
        assert_eq!(args.launch(&[99]).bytes - args.launch(&[98]).bytes, 2 * 3 * 22 * 2);
        args.window = 17;
        assert_eq!(args.launch(&[99]).bytes, args.launch(&[16]).bytes);
    }
}
