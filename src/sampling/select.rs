//! One draw from penalised logits, exact in integers.
//!
//! Every weight exp((l - max) / temperature) is computed in f32 with a fixed sequence of separately rounded operations
//! and then made an integer, [`ONE`] for the most likely token. Sums of integers do not depend on their order, so that
//! a parallel device that computes the same weights finds the same token, bit for bit.

/// A logit and its token in one integer whose order is that of choosing: larger logits first, then lower ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(u64);

impl Key {
    pub(super) fn new(logit: f32, token_id: u32) -> Self {
        // Adding zero turns -0 into +0, with which it ties.
        let bits = (logit + 0.0).to_bits();
        let ordered = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
        Self(u64::from(ordered) << 32 | u64::from(!token_id))
    }

    /// Above every token that is masked by a logit of minus infinity and below all others.
    fn floor() -> Self {
        Self::new(f32::NEG_INFINITY, 0)
    }

    pub(super) fn token_id(self) -> u32 {
        !(self.0 as u32)
    }

    pub(super) fn logit(self) -> f32 {
        let ordered = (self.0 >> 32) as u32;
        f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
    }
}

/// Fills `kept` with the keys of the `k` largest logits, ties to the lowest ids, in no order; fewer when fewer are above
/// minus infinity. Linear in `logits` whatever `k` is, and little more than one comparison each when `k` is small.
pub(super) fn top_k(logits: &[f32], k: usize, kept: &mut Vec<Key>) {
    let room = k + k.clamp(64, 4096);
    kept.clear();
    let (mut floor, mut floor_logit) = (Key::floor(), f32::NEG_INFINITY);
    for (id, &logit) in (0u32..).zip(logits) {
        if logit >= floor_logit && Key::new(logit, id) > floor {
            kept.push(Key::new(logit, id));
            if kept.len() == room {
                floor = shrink(kept, k);
                floor_logit = floor.logit();
            }
        }
    }
    if kept.len() > k {
        shrink(kept, k);
    }
}

/// Leaves the `k` first of `keys`, which are more; the last of them is returned.
fn shrink(keys: &mut Vec<Key>, k: usize) -> Key {
    let (_, last, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    let last = *last;
    keys.truncate(k);
    last
}

/// The most likely token, ties to the lowest id; `None` when all are masked.
pub(super) fn greedy(logits: &[f32]) -> Option<u32> {
    let mut best = (f32::NEG_INFINITY, None);
    for (id, &logit) in (0u32..).zip(logits) {
        if logit > best.0 {
            best = (logit, Some(id));
        }
    }
    best.1
}

/// The weight of the most likely token. A vocabulary of 2^23 tokens of this weight still sums below 2^63.
const ONE: u64 = 1 << 40;

/// exp(x) * [`ONE`] for x <= 0, rounded; 0 below -29, where it would round to 0. The error is at most 1e-7 of the
/// exact value and half a unit, and larger x never give smaller weights. Cephes' expf polynomial; products and sums are
/// rounded one by one, because fused ones are a slow library call where the build cannot count on the instruction.
fn weight(x: f32) -> u64 {
    // Exact for every n that occurs: LN2_HIGH has nine bits.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_3e-4;
    // Adding and subtracting it rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    if x < -29.0 {
        return 0;
    }
    let n = x * std::f32::consts::LOG2_E + ROUND - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let p = p * (r * r) + r + 1.0;
    // exp(x) = p * 2^n, and p is its 24-bit mantissa times a power of two.
    let mantissa = u64::from(p.to_bits() & 0x007F_FFFF | 0x0080_0000);
    let shift = (p.to_bits() >> 23) as i32 - 127 - 23 + 40 + n as i32;
    if shift >= 0 { mantissa << shift } else { (mantissa + (1 << (-shift - 1))) >> -shift }
}

/// The smallest weight that `min_p`, in [0, 1], keeps.
pub(crate) fn least_weight(min_p: f32) -> u64 {
    ((f64::from(min_p) * ONE as f64).ceil() as u64).max(1)
}

/// `top_p`, in (0, 1], times 2^32, rounded; 2^32 for 1 alone.
pub(crate) fn nucleus_share(top_p: f32) -> u64 {
    (f64::from(top_p) * 2f64.powi(32)).round() as u64
}

/// How [`Draw::draw`] narrows and shapes the distribution.
pub(super) struct Shape {
    /// Above 0.
    pub(super) temperature: f32,
    /// In [0, 1].
    pub(super) min_p: f32,
    /// `None` keeps all.
    pub(super) top_k: Option<usize>,
    /// In (0, 1].
    pub(super) top_p: f32,
}

#[derive(Clone, Copy)]
struct Candidate {
    key: Key,
    /// 1 to [`ONE`].
    weight: u64,
}

/// Draws tokens; owns the memory for it.
#[derive(Default)]
pub(super) struct Draw {
    keys: Vec<Key>,
    /// In order of ids.
    candidates: Vec<Candidate>,
    border: Vec<Candidate>,
}

impl Draw {
    /// The token that the 64 random bits `random` choose from `logits` (`[V]`, no NaN, no plus infinity); `None` when
    /// all are masked. Candidates stand in order of their ids; with r = random * total / 2^64 rounded down, the first
    /// one whose running sum of weights exceeds r is chosen.
    pub(super) fn draw(&mut self, logits: &[f32], shape: &Shape, random: u64) -> Option<u32> {
        self.narrow(logits, shape)?;
        let r = multiply_high(random, total(&self.candidates));
        let mut sum = 0;
        let chosen = self.candidates.iter().find(|c| {
            sum += c.weight;
            sum > r
        });
        chosen.map(|c| c.key.token_id())
    }

    /// Leaves as candidates what temperature, `min_p`, `top_k` and `top_p` leave; `None` when all are masked.
    fn narrow(&mut self, logits: &[f32], shape: &Shape) -> Option<()> {
        top_k(logits, shape.top_k.unwrap_or(logits.len()).min(logits.len()), &mut self.keys);
        self.keys.sort_unstable_by_key(|key| key.token_id());
        let max = self.keys.iter().max()?.logit();
        // min_p and top_k each keep a first part of one order, so that taking top_k first changes nothing but the cost.
        let least = least_weight(shape.min_p);
        let weigh = |&key: &Key| Candidate { key, weight: weight((key.logit() - max) / shape.temperature) };
        self.candidates.clear();
        self.candidates.extend(self.keys.iter().map(weigh).filter(|c| c.weight >= least));
        if shape.top_p < 1.0 {
            let share = u128::from(nucleus_share(shape.top_p));
            let need = (u128::from(total(&self.candidates)) * share).div_ceil(1 << 32) as u64;
            let last = self.nucleus_end(need);
            self.candidates.retain(|c| c.key >= last);
        }
        Some(())
    }

    /// The key at which the weights, taken from the first key on, reach `need`, which is at most their sum; the first
    /// key if `need` is 0. Linear: weights never rise along the keys, so their highest bits put the keys in rough
    /// order, and only those around the end are bisected.
    fn nucleus_end(&mut self, mut need: u64) -> Key {
        let mut mass = [0; ONE.ilog2() as usize + 1];
        for c in &self.candidates {
            mass[c.weight.ilog2() as usize] += c.weight;
        }
        let mut class = ONE.ilog2();
        while mass[class as usize] < need {
            need -= mass[class as usize];
            class -= 1;
        }
        self.border.clear();
        self.border.extend(self.candidates.iter().filter(|c| c.weight.ilog2() == class));
        let mut rest = &mut self.border[..];
        while rest.len() > 1 {
            let half = rest.len() / 2;
            rest.select_nth_unstable_by(half, |a, b| b.key.cmp(&a.key));
            let first = total(&rest[..half]);
            if first >= need {
                rest = &mut rest[..half];
            } else {
                need -= first;
                rest = &mut rest[half..];
            }
        }
        rest[0].key
    }
}

fn total(candidates: &[Candidate]) -> u64 {
    candidates.iter().map(|c| c.weight).sum()
}

/// The upper 64 bits of the product.
fn multiply_high(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every f32 in [-29, -2^-26], of which there are 247 million, in ascending order.
    #[test]
    fn weights_are_exact_enough_and_never_fall_as_x_rises() {
        let (lowest, highest) = ((-29f32).to_bits(), (-(-26f32).exp2()).to_bits());
        let mut before = 0;
        for bits in (highest..=lowest).rev() {
            let x = f32::from_bits(bits);
            let found = weight(x);
            assert!(found >= before, "falls at {x:e}");
            before = found;
            if bits % 61 == 0 {
                let exact = f64::from(x).exp() * ONE as f64;
                let error = (found as f64 - exact).abs();
                assert!(error <= exact * 1e-7 + 0.5, "at {x:e}: {found} for {exact}");
            }
        }
        assert!(before <= ONE);
        assert_eq!((weight(0.0), weight(-0.0), weight(-1e-38)), (ONE, ONE, ONE));
        assert_eq!((weight(-29.01), weight(f32::MIN), weight(f32::NEG_INFINITY)), (0, 0, 0));
    }
}
