//! Random numbers that a GPU can draw too, in any order.

/// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |a: u32, b: u32| {
        let wide = u64::from(a) * u64::from(b);
        ((wide >> 32) as u32, wide as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = product(0xD251_1F53, counter[0]);
        let (high1, low1) = product(0xCD9E_8D57, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// 64 random bits for output token number `position` under `seed`: both as key and counter with the low word first,
/// the result's low word first too. The upper half of the counter stays free for other draws of the same token.
pub(super) fn random(seed: u64, position: u64) -> u64 {
    let words = |x: u64| [x as u32, (x >> 32) as u32];
    let [low, high] = words(position);
    let out = philox4x32_10([low, high, 0, 0], words(seed));
    u64::from(out[1]) << 32 | u64::from(out[0])
}

/// A seed nobody chose, from the operating system's entropy.
pub(crate) fn fresh_seed() -> u64 {
    // The standard library's hash keys are drawn from it, and differ from one state to the next.
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), ())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors published with Random123 (`kat_vectors`).
    #[test]
    fn known_answers() {
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    #[test]
    fn seed_and_position_fill_key_and_counter_low_word_first() {
        assert_eq!(random(0, 0), 0xe169_c58d_6627_e8d5);
        let out = philox4x32_10([2, 1, 0, 0], [4, 3]);
        assert_eq!(random(0x3_0000_0004, 0x1_0000_0002), u64::from(out[1]) << 32 | u64::from(out[0]));
    }

    #[test]
    fn fresh_seeds_differ() {
        assert_ne!(fresh_seed(), fresh_seed());
    }
}
