//! Stop strings in streamed text.

use std::collections::VecDeque;

/// What a piece of text let through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Text that can no longer be part of a stop string.
    pub text: String,
    /// Whether a stop string ended the text.
    pub matched: bool,
}

/// Finds stop strings in text that comes in pieces, wherever the pieces are cut. The match that ends first counts, and
/// of those that end there, the longest: this is known as soon as it is complete. Holds back the longest end of
/// the text that a stop string may begin with, and no more. Linear in the text, for given stop strings.
pub struct StopMatcher {
    stops: Vec<Stop>,
    include: bool,
    /// Not given out yet; whole characters.
    held: VecDeque<u8>,
}

/// One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt).
struct Stop {
    text: Vec<u8>,
    /// For each length of a beginning: the next shorter one that it ends with.
    shorter: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let mut stop = Self { text: text.as_bytes().to_vec(), shorter: vec![0; 2], matched: 0 };
        for i in 1..stop.text.len() {
            stop.advance(stop.text[i]);
            stop.shorter.push(stop.matched);
        }
        stop.matched = 0;
        stop
    }

    /// Takes the next byte of the text; whether the whole string stands now.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.text.get(self.matched) != Some(&byte) {
            self.matched = self.shorter[self.matched];
        }
        if self.text[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.text.len()
    }
}

impl StopMatcher {
    /// For `stops`, none of them empty; with `include`, a stop string that is found stays in the text.
    pub fn new(stops: &[String], include: bool) -> Self {
        Self { stops: stops.iter().map(|stop| Stop::new(stop)).collect(), include, held: VecDeque::new() }
    }

    /// Takes the next piece. Nothing may be pushed once a stop string matched.
    pub fn push(&mut self, piece: &str) -> Step {
        for byte in piece.bytes() {
            self.held.push_back(byte);
            let complete = self.stops.iter_mut().filter_map(|stop| stop.advance(byte).then_some(stop.text.len()));
            if let Some(longest) = complete.max() {
                let cut = if self.include { 0 } else { longest };
                let text = self.take(self.held.len() - cut);
                self.held.clear();
                return Step { text, matched: true };
            }
        }
        let open = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        Step { text: self.take(self.held.len() - open), matched: false }
    }

    /// What was still held back, when the text ends without a stop string.
    pub fn finish(&mut self) -> String {
        self.take(self.held.len())
    }

    fn take(&mut self, bytes: usize) -> String {
        let text = self.held.drain(..bytes).collect();
        String::from_utf8(text).expect("stop strings and pieces are whole characters, so every cut is between two")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition: text given out in the end, and whether a stop string was found.
    fn search(text: &str, stops: &[String], include: bool) -> (String, bool) {
        for end in 1..=text.len() {
            let here = stops.iter().filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
            if let Some(longest) = here.map(String::len).max() {
                let cut = if include { end } else { end - longest };
                return (text[..cut].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    /// Bytes of the longest end of `text` that is a beginning of a stop string.
    fn open_end(text: &str, stops: &[String]) -> usize {
        let begins = |len: &usize| stops.iter().any(|s| s.as_bytes().starts_with(&text.as_bytes()[text.len() - len..]));
        (0..=text.len()).rev().find(begins).unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

        #[test]
        fn pieces_give_what_a_search_of_the_whole_text_gives(
            pieces in prop::collection::vec("[abéè]{0,5}", 0..10),
            stops in prop::collection::vec("[abéè]{1,5}", 0..4),
            include: bool,
        ) {
            let mut matcher = StopMatcher::new(&stops, include);
            let (mut given, mut seen, mut matched) = (String::new(), String::new(), false);
            for piece in &pieces {
                let step = matcher.push(piece);
                given.push_str(&step.text);
                seen.push_str(piece);
                matched = step.matched;
                if matched {
                    break;
                }
                prop_assert_eq!(seen.len() - given.len(), open_end(&seen, &stops));
            }
            given.push_str(&matcher.finish());
            prop_assert_eq!((given, matched), search(&pieces.concat(), &stops, include));
        }
    }

    #[test]
    fn the_first_match_to_end_counts_and_the_longest_there() {
        let stops = ["abcd", "bc", "c"].map(str::to_owned);
        let mut matcher = StopMatcher::new(&stops, false);
        assert_eq!(matcher.push("xab"), Step { text: "x".into(), matched: false });
        assert_eq!(matcher.push("cd"), Step { text: "a".into(), matched: true });
        let mut matcher = StopMatcher::new(&stops, true);
        assert_eq!(matcher.push("xabcd"), Step { text: "xabc".into(), matched: true });
    }

    #[test]
    fn long_stop_strings_and_small_pieces_take_linear_time() {
        // Quadratic work would be 10^11 steps.
        let mut matcher = StopMatcher::new(&["a".repeat(300_000) + "b"], false);
        let mut given = 0;
        for _ in 0..600_000 {
            given += matcher.push("a").text.len();
        }
        assert_eq!(given, 300_000);
        assert!(matcher.push("b").matched);
    }
}
