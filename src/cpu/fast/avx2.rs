//! The inner loops in AVX2 with FMA and F16C. What each computes is said in [`super::simd::Isa`], which also checks the bounds
//! that [`tile`] relies on.
#![allow(clippy::wildcard_imports)] // The intrinsics are better known by name than by import.

use std::arch::x86_64::*;

use super::{
    portable,
    simd::{Panel, TILE_COLS, TILE_ROWS, Tile, packed_len},
};
use crate::{checkpoint::DType, cpu::Precision, nvfp4::SCALES};

/// Doubled values of the 4-bit codes, as signed bytes.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// First and second byte of the values of the 4-bit codes as f32; the other two are zero.
const TOP: [i8; 16] = [0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64];
const SECOND: [i8; 16] = [0, 0, -128, -64, 0, 0x40, -128, -64, 0, 0, -128, -64, 0, 0x40, -128, -64];

#[target_feature(enable = "avx2,fma,f16c")]
fn load(x: &[f32]) -> __m256 {
    let x = &x[..8];
    // SAFETY: eight values, checked.
    unsafe { _mm256_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn store(out: &mut [f32], x: __m256) {
    let out = &mut out[..8];
    // SAFETY: room for eight values, checked.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn load_bytes<const N: usize>(bytes: &[u8]) -> __m128i {
    let mut buffer = [0u8; 16];
    buffer[..N].copy_from_slice(&bytes[..N]);
    // SAFETY: sixteen bytes.
    unsafe { _mm_loadu_si128(buffer.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn table(bytes: &[i8; 16]) -> __m128i {
    // SAFETY: sixteen bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn sum(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// Eight values of a type without blocks.
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_8(dtype: DType, bytes: &[u8]) -> __m256 {
    match dtype {
        DType::F16 => _mm256_cvtph_ps(load_bytes::<16>(bytes)),
        DType::Bf16 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_bytes::<16>(bytes)))),
        _ => {
            let bytes = &bytes[..32];
            // SAFETY: 32 bytes, checked; the load needs no alignment.
            unsafe { _mm256_loadu_ps(bytes.as_ptr().cast()) }
        }
    }
}

/// Eight signed bytes as f32.
#[target_feature(enable = "avx2,fma,f16c")]
fn signed_8(bytes: __m128i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn f16_scale(block: &[u8]) -> __m256 {
    _mm256_cvtph_ps(_mm_set1_epi16(i16::from_le_bytes([block[0], block[1]])))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::Nvfp4 => {
            let doubled = table(&DOUBLED);
            let nibble = _mm_set1_epi8(15);
            for (out, block) in out.chunks_exact_mut(64).zip(bytes.chunks_exact(36)) {
                for (s, out) in out.chunks_exact_mut(16).enumerate() {
                    let scale = _mm256_set1_ps(0.5 * SCALES[usize::from(block[s])]);
                    let codes = load_bytes::<8>(&block[4 + 8 * s..]);
                    let low = _mm_and_si128(codes, nibble);
                    let high = _mm_and_si128(_mm_srli_epi16::<4>(codes), nibble);
                    store(out, _mm256_mul_ps(signed_8(_mm_shuffle_epi8(doubled, low)), scale));
                    store(&mut out[8..], _mm256_mul_ps(signed_8(_mm_shuffle_epi8(doubled, high)), scale));
                }
            }
        }
        DType::Q8_0 => {
            for (out, block) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(34)) {
                let scale = f16_scale(block);
                for (out, codes) in out.chunks_exact_mut(8).zip(block[2..].chunks_exact(8)) {
                    store(out, _mm256_mul_ps(signed_8(load_bytes::<8>(codes)), scale));
                }
            }
        }
        _ => {
            let whole = out.len() / 8 * 8;
            let (out, out_rest) = out.split_at_mut(whole);
            let (bytes, bytes_rest) = bytes.split_at(packed_len(dtype, whole));
            for (out, bytes) in out.chunks_exact_mut(8).zip(bytes.chunks_exact(packed_len(dtype, 8))) {
                store(out, decode_8(dtype, bytes));
            }
            portable::decode(dtype, bytes_rest, out_rest);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn dot(dtype: DType, row: &[u8], x: &[f32]) -> f32 {
    assert_eq!(row.len(), packed_len(dtype, x.len()));
    match dtype {
        DType::Nvfp4 => dot_nvfp4(row, x),
        DType::Q8_0 => {
            let mut total = _mm256_setzero_ps();
            for (x, block) in x.chunks_exact(32).zip(row.chunks_exact(34)) {
                let mut part = _mm256_setzero_ps();
                for (x, codes) in x.chunks_exact(8).zip(block[2..].chunks_exact(8)) {
                    part = _mm256_fmadd_ps(signed_8(load_bytes::<8>(codes)), load(x), part);
                }
                total = _mm256_fmadd_ps(part, f16_scale(block), total);
            }
            sum(total)
        }
        DType::F16 => dot_8::<16>(row, x, DType::F16),
        DType::Bf16 => dot_8::<16>(row, x, DType::Bf16),
        _ => dot_8::<32>(row, x, DType::F32),
    }
}

/// [`dot`] for a type of `BYTES` bytes each eight values.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_8<const BYTES: usize>(row: &[u8], x: &[f32], dtype: DType) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 4];
    let whole = x.len() / 32 * 32;
    for (x, row) in x.chunks_exact(32).zip(row.chunks_exact(4 * BYTES)) {
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = _mm256_fmadd_ps(decode_8(dtype, &row[BYTES * i..]), load(&x[8 * i..]), *sum);
        }
    }
    let sums = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    sum(sums) + portable::dot(dtype, &row[whole / 8 * BYTES..], &x[whole..])
}

/// The order that [`dot_nvfp4`] wants: for each block of 64, the eight vectors that it meets.
pub fn arrange_nvfp4(x: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for block in x.chunks_exact(64) {
        // First value of a sub-block pair, then even and odd values of both.
        for first in [0, 16, 8, 24] {
            for parity in [0, 1] {
                for half in [0, 32] {
                    out.extend((0..4).map(|i| block[first + half + 2 * i + parity]));
                }
            }
        }
    }
    out
}

/// The 32 code bytes of a block become four registers of 16 BF16 values by looking up the two bytes of each value and
/// interleaving them; even values of a sub-block then lie in the lower and odd ones in the upper halves of the words. No value
/// is moved to its place in the row: [`arrange_nvfp4`] did that to x, once for all rows. That is half the instructions of
/// widening in order.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_nvfp4(row: &[u8], x: &[f32]) -> f32 {
    let top = _mm256_broadcastsi128_si256(table(&TOP));
    let second = _mm256_broadcastsi128_si256(table(&SECOND));
    let nibble = _mm256_set1_epi8(15);
    // Each lane of 128 bits holds two sub-blocks, 0 and 1 or 2 and 3; a scale byte goes to the upper bytes of four halves.
    let spread_02 = _mm_set_epi8(2, -1, 2, -1, 2, -1, 2, -1, 0, -1, 0, -1, 0, -1, 0, -1);
    let spread_13 = _mm_set_epi8(3, -1, 3, -1, 3, -1, 3, -1, 1, -1, 1, -1, 1, -1, 1, -1);
    let (mut sum_02, mut sum_13) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for (block, x) in row.chunks_exact(36).zip(x.chunks_exact(64)) {
        // SAFETY: bytes 4 to 35 of a block of 36.
        let codes = unsafe { _mm256_loadu_si256(block[4..36].as_ptr().cast()) };
        let low = _mm256_and_si256(codes, nibble);
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(codes), nibble);
        let (low_top, low_second) = (_mm256_shuffle_epi8(top, low), _mm256_shuffle_epi8(second, low));
        let (high_top, high_second) = (_mm256_shuffle_epi8(top, high), _mm256_shuffle_epi8(second, high));
        let part_02 = dot_pairs(_mm256_unpacklo_epi8(low_second, low_top), &x[..16], _mm256_setzero_ps());
        let part_13 = dot_pairs(_mm256_unpackhi_epi8(low_second, low_top), &x[16..32], _mm256_setzero_ps());
        let part_02 = dot_pairs(_mm256_unpacklo_epi8(high_second, high_top), &x[32..48], part_02);
        let part_13 = dot_pairs(_mm256_unpackhi_epi8(high_second, high_top), &x[48..64], part_13);
        let scales = i32::from_le_bytes([block[0], block[1], block[2], block[3]]) & 0x7F7F_7F7F;
        let scales = _mm_set1_epi32(scales);
        let scales = _mm_andnot_si128(_mm_cmpeq_epi8(scales, _mm_set1_epi8(0x7F)), scales);
        sum_02 = _mm256_fmadd_ps(part_02, e4m3(_mm_shuffle_epi8(scales, spread_02)), sum_02);
        sum_13 = _mm256_fmadd_ps(part_13, e4m3(_mm_shuffle_epi8(scales, spread_13)), sum_13);
    }
    256.0 * sum(_mm256_add_ps(sum_02, sum_13))
}

/// sum + the products of 16 BF16 values and x: even values first, then odd ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_pairs(pairs: __m256i, x: &[f32], sum: __m256) -> __m256 {
    let even = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
    let odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x1_0000)));
    _mm256_fmadd_ps(odd, load(&x[8..]), _mm256_fmadd_ps(even, load(x), sum))
}

/// Block scales, each in the upper byte of a half, over 256: moved by one bit they are IEEE halves with bias 15 for 7.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn e4m3(scales: __m128i) -> __m256 {
    _mm256_cvtph_ps(_mm_srli_epi16::<1>(scales))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn transpose(rows: &[f32], panel: &mut [f32]) {
    let k = rows.len() / TILE_COLS;
    let whole = k / 8 * 8;
    for half in [0, 8] {
        for first in (0..whole).step_by(8) {
            let r: [__m256; 8] = std::array::from_fn(|j| load(&rows[(half + j) * k + first..]));
            let t: [__m256; 8] = std::array::from_fn(|j| {
                let (a, b) = (r[j / 2 * 2], r[j / 2 * 2 + 1]);
                if j % 2 == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
            });
            let r: [__m256; 8] = std::array::from_fn(|j| {
                let (a, b) = (t[j / 4 * 4 + j / 2 % 2], t[j / 4 * 4 + j / 2 % 2 + 2]);
                if j % 2 == 0 { _mm256_shuffle_ps::<0x44>(a, b) } else { _mm256_shuffle_ps::<0xEE>(a, b) }
            });
            for j in 0..4 {
                let (a, b) = (r[j], r[j + 4]);
                let at = |column: usize| (first + column) * TILE_COLS + half;
                store(&mut panel[at(j)..], _mm256_permute2f128_ps::<0x20>(a, b));
                store(&mut panel[at(j + 4)..], _mm256_permute2f128_ps::<0x31>(a, b));
            }
        }
    }
    for i in whole..k {
        for j in 0..TILE_COLS {
            panel[i * TILE_COLS + j] = rows[j * k + i];
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn tile<const R: usize>(a: Tile<'_>, b: Panel<'_>, c: &mut [f32], c_stride: usize) {
    if (a.row_stride, a.k_stride, b.k_stride) == (1, TILE_ROWS, TILE_COLS) {
        tile_steps::<R, true>(a, b, c, c_stride);
    } else {
        tile_steps::<R, false>(a, b, c, c_stride);
    }
}

/// Twelve accumulators, two loads and six broadcasts a step: as many as the sixteen registers allow. `PACKED` sides have
/// strides that the compiler knows, so that a step is little but loads and products.
#[target_feature(enable = "avx2,fma,f16c")]
fn tile_steps<const R: usize, const PACKED: bool>(a: Tile<'_>, b: Panel<'_>, c: &mut [f32], c_stride: usize) {
    let (row_stride, a_step, b_step) =
        if PACKED { (1, TILE_ROWS, TILE_COLS) } else { (a.row_stride, a.k_stride, b.k_stride) };
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    let (mut a_k, mut b_k) = (a.values.as_ptr(), b.values.as_ptr());
    for _ in 0..a.k {
        // SAFETY: `Isa::tile` checked that rows `R - 1` and step `k - 1` of both sides are inside. The pointers end one step past
        // the last, so they advance without a claim to be inside.
        unsafe {
            let (b0, b1) = (_mm256_loadu_ps(b_k), _mm256_loadu_ps(b_k.add(8)));
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = _mm256_broadcast_ss(&*a_k.add(i * row_stride));
                sums[0] = _mm256_fmadd_ps(a, b0, sums[0]);
                sums[1] = _mm256_fmadd_ps(a, b1, sums[1]);
            }
        }
        a_k = a_k.wrapping_add(a_step);
        b_k = b_k.wrapping_add(b_step);
    }
    for (i, sums) in sums.iter().enumerate() {
        let c = &mut c[i * c_stride..i * c_stride + TILE_COLS];
        for (c, &sum) in c.chunks_exact_mut(8).zip(sums) {
            let total = _mm256_add_ps(load(c), sum);
            store(c, total);
        }
    }
}

/// e^x with a relative error of about 1e-7, for x cut to [-87.3, 88.3]: x = n ln 2 + r, a polynomial for e^r (the
/// coefficients of the Cephes library), n to the exponent. NaN stays NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn exp(x: __m256) -> __m256 {
    // The second operand is the result when one is NaN.
    let x = _mm256_max_ps(_mm256_set1_ps(-87.3), _mm256_min_ps(_mm256_set1_ps(88.3), x));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        _mm256_set1_ps(std::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts; the first has so few digits that n times it is exact.
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm256_set1_ps(1.987_569_2e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1.0, 1.0] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
    _mm256_mul_ps(p, _mm256_castsi256_ps(power))
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn softmax(row: &mut [f32], scale: f32, sink: f32, precision: Precision) {
    let mut max = sink;
    for x in row.iter_mut() {
        *x *= scale;
        max = max.max(*x);
    }
    let whole = row.len() / 8 * 8;
    let mut denominator = (sink - max).exp();
    for row in row[..whole].chunks_mut(512) {
        let mut sums = _mm256_setzero_ps();
        for x in row.chunks_exact_mut(8) {
            let y = exp(_mm256_sub_ps(load(x), _mm256_set1_ps(max)));
            sums = _mm256_add_ps(sums, y);
            store(x, y);
        }
        denominator += sum(sums);
    }
    for x in &mut row[whole..] {
        *x = (*x - max).exp();
        denominator += *x;
    }
    for x in row {
        *x = precision.round(*x / denominator);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn silu_mul(gate: &mut [f32], gate_scale: f32, up: &[f32], up_scale: f32, precision: Precision) {
    let whole = gate.len() / 8 * 8;
    let (head, rest) = gate.split_at_mut(whole);
    for (gate, up) in head.chunks_exact_mut(8).zip(up.chunks_exact(8)) {
        let x = _mm256_mul_ps(load(gate), _mm256_set1_ps(gate_scale));
        let negative = _mm256_sub_ps(_mm256_setzero_ps(), x);
        let silu = _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0), exp(negative)));
        store(gate, _mm256_mul_ps(silu, _mm256_mul_ps(load(up), _mm256_set1_ps(up_scale))));
        for x in gate {
            *x = precision.round(*x);
        }
    }
    portable::silu_mul(rest, gate_scale, &up[whole..], up_scale, precision);
}
