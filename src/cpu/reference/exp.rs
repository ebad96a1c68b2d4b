//! The exponential function, of products and additions alone.

/// e^x, at most 0.72 units in the last place away (0.78 below the normal numbers), and the same bits on every machine: no two
/// libraries round theirs alike, and the general kernels repeat this one.
///
/// x = n ln 2 + r with n whole, e^r = 1 + r + r^2 q(r); what 1 + r loses is added to the last term.
#[allow(clippy::excessive_precision, reason = "the exact values of the constants")]
pub fn exp(x: f32) -> f32 {
    // So large that its last place is 1: adding it rounds to a whole number, which its low bits then hold.
    const WHOLE: f32 = 12_582_912.0;
    // Of 15 binary digits, so that n times it is exact, and the rest.
    const LN_2: [f32; 2] = [0.693_145_751_953_125, 1.428_606_77e-6];
    // Fitted for the least relative error of e^r.
    const Q: [f32; 5] = [0.001_386_366_8, 0.008_367_609, 0.041_667_24, 0.166_665_33, 0.5];

    // The results round to these; NaN is on neither side.
    if x < -104.0 {
        return 0.0;
    }
    if x > 89.0 {
        return f32::INFINITY;
    }

    let shifted = x * std::f32::consts::LOG2_E + WHOLE;
    let n = shifted - WHOLE;
    let (high, low) = (x - n * LN_2[0], -(n * LN_2[1]));
    let r = high + low;
    let q = Q[1..].iter().fold(Q[0], |q, c| q * r + c);
    let one_and_high = 1.0 + high;
    let lost = high - (one_and_high - 1.0) + low;
    // 2^n in two factors, as it may be below the normal numbers.
    let n = shifted.to_bits().wrapping_sub(WHOLE.to_bits()).cast_signed();
    let power = |n: i32| f32::from_bits(((127 + n) << 23).cast_unsigned());
    (one_and_high + (r * r * q + lost)) * power(n >> 1) * power(n - (n >> 1))
}

#[cfg(test)]
mod tests {
    use super::exp;
    use crate::cpu::spread_words;

    #[test]
    fn is_close_and_has_the_right_ends() {
        for (i, bits) in spread_words().take(2_000_000).enumerate() {
            let x = (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
            // Among them the worst.
            let x = if i == 0 { 59.996_906 } else { [x, 20.0 * x, 87.0 * x, -104.0 * x.abs()][i % 4] };
            let (found, expected) = (exp(x), f64::from(x).exp());
            let ulp = f64::from(f32::from_bits((expected as f32).to_bits() + 1)) - f64::from(expected as f32);
            let bound = if expected < f64::from(f32::MIN_POSITIVE) { 0.78 } else { 0.72 };
            assert!((f64::from(found) - expected).abs() <= bound * ulp, "exp({x:e}) is {found:e}, not {expected:e}");
        }
        for (x, expected) in [
            (0.0, 1.0),
            (-0.0, 1.0),
            (f32::MIN_POSITIVE, 1.0),
            (-103.0, f32::from_bits(1)),
            (-104.0, 0.0),
            (-1e30, 0.0),
            (f32::NEG_INFINITY, 0.0),
            (88.8, f32::INFINITY),
            (1e30, f32::INFINITY),
            (f32::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(exp(x).to_bits(), f32::to_bits(expected), "{x:e}");
        }
        assert!(exp(f32::NAN).is_nan());
    }
}
