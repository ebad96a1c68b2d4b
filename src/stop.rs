//! When a text ends: end tokens, stop tokens, stop strings, and the number of tokens.

use std::collections::{BTreeSet, VecDeque};

use crate::sampling::SamplingParams;

/// Why a text ended by its own rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model's own end token stands last.
    EndToken(u32),
    /// One of the request's `stop_token_ids` stands last.
    StopToken(u32),
    /// `max_tokens` stand.
    Length,
}

/// The rules of a request that look at tokens.
#[derive(Clone, Debug)]
pub struct StopRules {
    ends: BTreeSet<u32>,
    stops: BTreeSet<u32>,
    min_tokens: usize,
    max_tokens: usize,
}

impl StopRules {
    /// Of a validated `params` for a model that ends on `end_token_ids`. `room_tokens` is what the context leaves: the
    /// most tokens whatever the request says.
    pub fn new(params: &SamplingParams, end_token_ids: &[u32], room_tokens: usize) -> Self {
        let ends = if params.ignore_eos { &[] } else { end_token_ids };
        Self {
            ends: ends.iter().copied().collect(),
            stops: params.stop_token_ids.iter().copied().collect(),
            min_tokens: params.min_tokens,
            max_tokens: params.max_tokens.map_or(room_tokens, |most| most.min(room_tokens)),
        }
    }

    /// Whether the text ends with `token_id`, number `output_tokens` of the output (1 for the first).
    pub fn after(&self, token_id: u32, output_tokens: usize) -> Option<Finish> {
        if self.armed(output_tokens) {
            if self.ends.contains(&token_id) {
                return Some(Finish::EndToken(token_id));
            }
            if self.stops.contains(&token_id) {
                return Some(Finish::StopToken(token_id));
            }
        }
        (output_tokens >= self.max_tokens).then_some(Finish::Length)
    }

    /// The most tokens that the text may have.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Whether token number `output_tokens` may end the text: `min_tokens` stand before it.
    pub fn armed(&self, output_tokens: usize) -> bool {
        output_tokens > self.min_tokens
    }
}

/// What [`StopMatcher::push`] lets through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopText {
    /// Text that no stop string can take back any more.
    pub text: String,
    /// Index of the stop string that was found; the text ends here.
    pub stop: Option<usize>,
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

    /// Takes the next piece of text. A stop string that ends in a piece that is not `armed` is none
    /// ([`StopRules::armed`]). Nothing may be pushed once a stop was found.
    pub fn push(&mut self, piece: &str, armed: bool) -> StopText {
        for byte in piece.bytes() {
            self.held.push_back(byte);
            let mut found: Option<usize> = None;
            for i in 0..self.stops.len() {
                if self.stops[i].advance(byte) && armed {
                    let longer = found.is_none_or(|best| self.stops[best].text.len() < self.stops[i].text.len());
                    found = if longer { Some(i) } else { found };
                }
            }
            if let Some(stop) = found {
                let cut = if self.include { 0 } else { self.stops[stop].text.len() };
                let text = self.take(self.held.len() - cut);
                self.held.clear();
                return StopText { text, stop: Some(stop) };
            }
        }
        // A whole string that was not armed can only go on as a shorter beginning.
        let may_become =
            |stop: &Stop| if stop.matched == stop.text.len() { stop.shorter[stop.matched] } else { stop.matched };
        let held = self.stops.iter().map(may_become).max().unwrap_or(0);
        StopText { text: self.take(self.held.len() - held), stop: None }
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

    /// The definition: text given out in the end, and the stop that was found.
    fn search(pieces: &[(String, bool)], stops: &[String], include: bool) -> (String, Option<usize>) {
        let text: String = pieces.iter().map(|(piece, _)| piece.as_str()).collect();
        let mut end = 0;
        for (piece, armed) in pieces {
            for _ in piece.bytes() {
                end += 1;
                let here =
                    (0..stops.len()).filter(|i| *armed && text.as_bytes()[..end].ends_with(stops[*i].as_bytes()));
                if let Some(stop) = here.min_by_key(|i| (usize::MAX - stops[*i].len(), *i)) {
                    let cut = if include { end } else { end - stops[stop].len() };
                    return (text[..cut].to_owned(), Some(stop));
                }
            }
        }
        (text, None)
    }

    /// Bytes of the longest end of `text` that is a beginning of a stop string, and not all of it.
    fn open_end(text: &str, stops: &[String]) -> usize {
        let begins =
            |len: &usize| stops.iter().any(|s| *len < s.len() && text.as_bytes().ends_with(&s.as_bytes()[..*len]));
        (0..=text.len()).rev().find(begins).unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

        #[test]
        fn pieces_give_what_a_search_of_the_whole_text_gives(
            pieces in prop::collection::vec(("[abéè]{0,5}", prop::bool::weighted(0.7)), 0..10),
            stops in prop::collection::vec("[abéè]{1,5}", 0..4),
            include: bool,
        ) {
            let mut matcher = StopMatcher::new(&stops, include);
            let (mut given, mut seen, mut stop) = (String::new(), String::new(), None);
            for (piece, armed) in &pieces {
                let out = matcher.push(piece, *armed);
                given.push_str(&out.text);
                seen.push_str(piece);
                stop = out.stop;
                if stop.is_some() {
                    break;
                }
                prop_assert_eq!(seen.len() - given.len(), open_end(&seen, &stops));
            }
            given.push_str(&matcher.finish());
            prop_assert_eq!((given, stop), search(&pieces, &stops, include));
        }
    }

    #[test]
    fn the_first_match_to_end_counts_and_the_longest_there() {
        let stops = ["abcd", "bc", "c"].map(str::to_owned);
        let mut matcher = StopMatcher::new(&stops, false);
        assert_eq!(matcher.push("xab", true), StopText { text: "x".into(), stop: None });
        assert_eq!(matcher.push("cd", true), StopText { text: "a".into(), stop: Some(1) });
        let mut matcher = StopMatcher::new(&stops, true);
        assert_eq!(matcher.push("xabcd", true), StopText { text: "xabc".into(), stop: Some(1) });
    }

    #[test]
    fn long_stop_strings_and_small_pieces_take_linear_time() {
        // Quadratic work would be 10^11 steps.
        let stops = ["a".repeat(300_000) + "b"];
        let mut matcher = StopMatcher::new(&stops, false);
        let mut given = 0;
        for _ in 0..600_000 {
            given += matcher.push("a", true).text.len();
        }
        assert_eq!(given, 300_000);
        assert_eq!(matcher.push("b", true).stop, Some(0));
    }

    #[test]
    fn tokens_end_the_text_by_the_rules_of_the_request() {
        let params =
            SamplingParams { min_tokens: 2, max_tokens: Some(4), stop_token_ids: vec![7], ..Default::default() };
        let rules = StopRules::new(&params, &[1, 2], 100);
        assert_eq!([1, 2].map(|n| rules.after(1, n)), [None, None]);
        assert_eq!(rules.after(1, 3), Some(Finish::EndToken(1)));
        assert_eq!(rules.after(7, 3), Some(Finish::StopToken(7)));
        assert_eq!(rules.after(5, 3), None);
        assert_eq!(rules.after(5, 4), Some(Finish::Length));
        assert_eq!(rules.after(2, 4), Some(Finish::EndToken(2)));

        let params = SamplingParams { ignore_eos: true, stop_token_ids: vec![2], ..Default::default() };
        let rules = StopRules::new(&params, &[1, 2], 3);
        assert_eq!(rules.after(1, 1), None);
        assert_eq!(rules.after(2, 1), Some(Finish::StopToken(2)));
        assert_eq!(rules.after(5, 3), Some(Finish::Length));
    }
}
