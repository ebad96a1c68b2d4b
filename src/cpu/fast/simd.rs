//! The inner loops, in AVX2 (with FMA and F16C) or plain code, chosen once at run time.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::portable;
use crate::{checkpoint::DType, cpu::Precision};

/// Rows of a tile of [`Isa::tile`].
pub const TILE_ROWS: usize = 6;
/// Columns of a tile and of a panel.
pub const TILE_COLS: usize = 16;

/// Bytes of `n` values, whole blocks of `dtype`.
pub fn packed_len(dtype: DType, n: usize) -> usize {
    n / dtype.block_len() * dtype.block_bytes()
}

/// The instructions to use. Only [`Isa::detect`] makes `Avx2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Whatever the compiler makes of plain loops.
    Portable,
}

/// Calls the function of this name in `avx2` or `portable`.
macro_rules! dispatch {
    ($isa:expr, $function:ident $(::<$rows:literal>)? ($($argument:expr),*)) => {
        match $isa {
            // SAFETY: `Isa::Avx2` exists only on CPUs that were seen to have the instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::$function $(::<$rows>)? ($($argument),*) },
            Isa::Portable => portable::$function $(::<$rows>)? ($($argument),*),
        }
    };
}

impl Isa {
    /// The best that this CPU has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        Self::Portable
    }

    /// `x` for [`Isa::dot`].
    pub fn arrange(self, x: &[f32]) -> Arranged {
        let nvfp4 = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::arrange_nvfp4(x),
            Self::Portable => x.to_vec(),
        };
        Arranged { plain: x.to_vec(), nvfp4 }
    }

    /// The product of a packed row, without the scale of its tensor, and `x`.
    pub fn dot(self, dtype: DType, row: &[u8], x: &Arranged) -> f32 {
        let x = if dtype == DType::Nvfp4 { &x.nvfp4 } else { &x.plain };
        dispatch!(self, dot(dtype, row, x))
    }

    /// Writes the values of `bytes`, whole blocks of `dtype` without the scale of their tensor, to `out`.
    pub fn decode(self, dtype: DType, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), packed_len(dtype, out.len()));
        dispatch!(self, decode(dtype, bytes, out));
    }

    /// Transposes `rows`, `[16, k]`, to `panel`, `[k, 16]`.
    pub fn transpose(self, rows: &[f32], panel: &mut [f32]) {
        assert_eq!(rows.len(), panel.len());
        assert_eq!(rows.len() % TILE_COLS, 0);
        dispatch!(self, transpose(rows, panel));
    }

    /// Adds the product of a tile of `a` and a panel `b` to `c`: c[i, j] += sum over k of a[i, k] b[k, j], for `a.rows` (at most
    /// six) rows and 16 columns; the sum over k is made before it is added, so that sums over many panels stay sharp.
    pub fn tile(self, a: Tile<'_>, b: Panel<'_>, c: &mut [f32], c_stride: usize) {
        if a.k == 0 {
            return;
        }
        assert!((1..=TILE_ROWS).contains(&a.rows));
        assert!((a.rows - 1) * a.row_stride + (a.k - 1) * a.k_stride < a.values.len());
        assert!((a.k - 1) * b.k_stride + TILE_COLS <= b.values.len());
        assert!((a.rows - 1) * c_stride + TILE_COLS <= c.len());
        match a.rows {
            1 => dispatch!(self, tile::<1>(a, b, c, c_stride)),
            2 => dispatch!(self, tile::<2>(a, b, c, c_stride)),
            3 => dispatch!(self, tile::<3>(a, b, c, c_stride)),
            4 => dispatch!(self, tile::<4>(a, b, c, c_stride)),
            5 => dispatch!(self, tile::<5>(a, b, c, c_stride)),
            _ => dispatch!(self, tile::<6>(a, b, c, c_stride)),
        }
    }

    /// Softmax of `scale * row` with a sink that joins the maximum and the denominator, each probability rounded.
    pub fn softmax(self, row: &mut [f32], scale: f32, sink: f32, precision: Precision) {
        dispatch!(self, softmax(row, scale, sink, precision));
    }

    /// `gate = round(silu(gate * gate_scale) * (up * up_scale))`.
    pub fn silu_mul(self, gate: &mut [f32], gate_scale: f32, up: &[f32], up_scale: f32, precision: Precision) {
        assert_eq!(gate.len(), up.len());
        dispatch!(self, silu_mul(gate, gate_scale, up, up_scale, precision));
    }
}

/// One row of activations, as it is and in the order in which [`Isa::dot`] meets NVFP4 values.
pub struct Arranged {
    plain: Vec<f32>,
    nvfp4: Vec<f32>,
}

/// The left side of [`Isa::tile`]: a[i, k] is `values[i * row_stride + k * k_stride]`.
#[derive(Clone, Copy)]
pub struct Tile<'a> {
    pub values: &'a [f32],
    pub rows: usize,
    pub row_stride: usize,
    pub k: usize,
    pub k_stride: usize,
}

/// The right side of [`Isa::tile`]: b[k, j] is `values[k * k_stride + j]`.
#[derive(Clone, Copy)]
pub struct Panel<'a> {
    pub values: &'a [f32],
    pub k_stride: usize,
}
