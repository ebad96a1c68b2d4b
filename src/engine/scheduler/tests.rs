//! The loop over a device that is none: its tokens depend on all tokens of a sequence, so one that is fed wrongly shows.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Mutex,
        mpsc::{self, channel},
    },
    thread,
};

use super::*;
use crate::{
    kernels::{SAMPLE_RECORD_WORDS, SampleRecord},
    plan::TOKEN_RING,
};

const VOCAB: u32 = 50;
/// Logits of a row: more than there are tokens, as in a model whose embedding is padded.
const LOGITS: usize = 64;
const SIZES: Sizes = Sizes { sequences: 3, vocab_tokens: VOCAB as usize, logits: LOGITS, part_tokens: 100 };

/// Longer than any test waits: such a row ends when the test says so.
const ENDLESS: usize = 1 << 30;

/// What a test sees of the device, and makes it do.
#[derive(Default)]
struct Seen {
    steps: usize,
    /// Rows of every step that was begun.
    begun: Vec<usize>,
    prefills: usize,
    sequences: usize,
    /// Rows' next record is an error when their last token is this one.
    poison: Option<u32>,
    /// Calls that fail from now on.
    fails: bool,
    /// Whether the device stays broken then.
    broken: bool,
}

/// A device of [`TOKEN_RING`] unread steps.
struct Fake {
    seen: Arc<Mutex<Seen>>,
    sequences: BTreeMap<u32, Vec<u32>>,
    next_id: u32,
    rows: Vec<(u32, u32)>,
    /// Tokens that the rows feed next.
    unread: VecDeque<Vec<SampleRecord>>,
    queued: u32,
}

/// The token that follows `tokens`.
fn following(tokens: &[u32]) -> u32 {
    tokens.iter().fold(0x9E37, |hash, token| (hash ^ token).wrapping_mul(0x0100_0193).rotate_left(5)) % VOCAB
}

impl Fake {
    fn new(seen: &Arc<Mutex<Seen>>) -> Self {
        let (sequences, rows, unread) = (BTreeMap::new(), Vec::new(), VecDeque::new());
        Self { seen: Arc::clone(seen), sequences, next_id: 0, rows, unread, queued: 0 }
    }

    fn fail(&self) -> Result<()> {
        let why = "the test wants it".to_owned();
        if self.seen.lock().unwrap().fails { Err(Error::Device { what: "a fake step".into(), why }) } else { Ok(()) }
    }

    /// Runs a step over the rows' next tokens.
    fn queue(&mut self) -> Result<()> {
        self.fail()?;
        // So that an endless row makes no more tokens than a test can hold.
        thread::sleep(Duration::from_micros(50));
        assert!(self.unread.len() < TOKEN_RING, "more steps than the ring has lines");
        self.queued += 1;
        let mut seen = self.seen.lock().unwrap();
        seen.steps += 1;
        let mut records = Vec::new();
        for (id, token) in &mut self.rows {
            let tokens = self.sequences.get_mut(id).expect("a sequence of a step is there");
            tokens.push(*token);
            let mut words = [0; SAMPLE_RECORD_WORDS];
            // A NaN in the logits is an error of the row.
            words[1] = u32::from(seen.poison == Some(*token));
            *token = following(tokens);
            (words[0], words[2]) = (self.queued, *token);
            records.push(SampleRecord::new(&words));
        }
        self.unread.push_back(records);
        Ok(())
    }
}

impl Steps for Fake {
    type Id = u32;

    fn add_sequence(&mut self) -> Result<u32> {
        assert!(self.sequences.len() < SIZES.sequences, "more sequences than were planned for");
        self.next_id += 1;
        self.sequences.insert(self.next_id, Vec::new());
        self.seen.lock().unwrap().sequences = self.sequences.len();
        Ok(self.next_id)
    }

    fn remove_sequence(&mut self, id: u32) {
        assert!(self.sequences.remove(&id).is_some(), "a sequence that is not there");
        self.seen.lock().unwrap().sequences = self.sequences.len();
    }

    fn prefill(
        &mut self,
        id: u32,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize, usize),
        cancel: &Cancel,
    ) -> Result<()> {
        assert!(self.unread.is_empty(), "a prompt before all steps were read");
        self.seen.lock().unwrap().prefills += 1;
        for (done, token) in tokens.iter().enumerate() {
            progress(done, tokens.len());
            cancel.check()?;
            self.fail()?;
            self.sequences.get_mut(&id).expect("the sequence was added").push(*token);
        }
        progress(tokens.len(), tokens.len());
        Ok(())
    }

    fn prompt_logits(
        &mut self,
        id: u32,
        tokens: &[u32],
        sink: &mut dyn FnMut(&[f32]) -> Result<()>,
        cancel: &Cancel,
    ) -> Result<()> {
        assert!(tokens.len() <= SIZES.part_tokens, "more than a part");
        // Two rows at a time, and what is left.
        for pair in tokens.chunks(2) {
            self.prefill(id, pair, &mut |_, _| {}, cancel)?;
            let row = |&token: &u32| (0..LOGITS as u32).map(move |v| if v == (token + 1) % VOCAB { 3.0 } else { 0.0 });
            sink(&pair.iter().flat_map(row).collect::<Vec<f32>>())?;
        }
        Ok(())
    }

    fn begin_decode(&mut self, rows: &[(u32, u32, &SampleStart)]) -> Result<()> {
        assert!(self.unread.is_empty(), "rows changed before all steps were read");
        let ids: HashSet<_> = rows.iter().map(|row| row.0).collect();
        assert!(!rows.is_empty() && ids.len() == rows.len());
        for (.., start) in rows {
            let words = start.row.bytes();
            assert_eq!(words[60..], [0; 4], "a start for no records");
        }
        self.rows = rows.iter().map(|&(id, token, _)| (id, token)).collect();
        self.queued = 0;
        self.seen.lock().unwrap().begun.push(rows.len());
        self.queue()
    }

    fn continue_decode(&mut self) -> Result<()> {
        self.queue()
    }

    fn read_step(&mut self) -> Result<Option<Vec<SampleRecord>>> {
        Ok(self.unread.pop_front())
    }

    fn unread_steps(&self) -> usize {
        self.unread.len()
    }

    fn check(&mut self) -> Result<()> {
        if self.seen.lock().unwrap().broken { self.fail() } else { Ok(()) }
    }
}

fn scorer() -> Arc<Scorer> {
    Arc::new(Scorer::new(SIZES, Some(2)))
}

fn request(prompt: &[u32], params: &SamplingParams) -> (Running, Request) {
    let (sender, replies) = channel();
    let (cancel, backlog) = (Cancel::default(), Arc::new(Backlog::default()));
    let progress = PromptProgress::default();
    let request = Request {
        prompt: prompt.to_vec(),
        params: params.clone(),
        seed: 1,
        end_token_ids: Vec::new(),
        transcript: Transcript::new(params, None, ENDLESS).unwrap(),
        progress: progress.clone(),
        cancel: cancel.clone(),
        replies: sender,
        backlog: Arc::clone(&backlog),
    };
    (Running { replies, progress, cancel, backlog }, request)
}

/// A loop on a thread of its own.
struct Harness {
    seen: Arc<Mutex<Seen>>,
    work: Option<Sender<Work<Fake>>>,
    thread: Option<thread::JoinHandle<()>>,
}

struct Running {
    replies: Receiver<Result<Reply>>,
    progress: PromptProgress,
    cancel: Cancel,
    backlog: Arc<Backlog>,
}

impl Harness {
    fn new() -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (work, inbox) = channel();
        let inner = Arc::clone(&seen);
        let thread = thread::spawn(move || Scheduler::new(Fake::new(&inner), inbox, SIZES, scorer()).run());
        Self { seen, work: Some(work), thread: Some(thread) }
    }

    /// One whose loop goes on by [`turn`] alone.
    fn by_turns() -> (Self, Scheduler<Fake>) {
        let (work, inbox) = channel();
        let harness = Self { seen: Arc::default(), work: Some(work), thread: None };
        let scheduler = Scheduler::new(Fake::new(&harness.seen), inbox, SIZES, scorer());
        (harness, scheduler)
    }

    fn send(&self, work: Work<Fake>) {
        self.work.as_ref().unwrap().send(work).unwrap();
    }

    fn start(&self, prompt: &[u32], params: &SamplingParams) -> Running {
        self.start_limited(prompt, params, usize::MAX)
    }

    fn start_limited(&self, prompt: &[u32], params: &SamplingParams, ahead: usize) -> Running {
        let (running, request) = request(prompt, params);
        running.backlog.limit(ahead);
        self.send(Work::Generate(Box::new(request)));
        running
    }

    /// A row without an end of its own that is in the steps: its first token has come.
    fn start_endless(&self, prompt: &[u32]) -> Running {
        let running = self.start(prompt, &of_length(ENDLESS));
        running.replies.recv().unwrap().unwrap();
        running
    }

    /// A job that scores `tokens`.
    fn score(&self, tokens: &[u32], top_n: usize, cancel: &Cancel) -> Receiver<Result<Vec<TokenLogprobs>>> {
        let (job, scores) = scorer().job(tokens, top_n, cancel);
        self.send(Work::Job(job));
        scores
    }

    /// Spins, for as long as the loop goes on.
    fn wait_until(&self, there: impl Fn() -> bool) {
        while !there() {
            assert!(!self.thread.as_ref().unwrap().is_finished(), "the loop has ended");
            thread::yield_now();
        }
    }

    /// Ends the loop, which must not have panicked.
    fn end(mut self) -> Seen {
        self.work = None;
        self.thread.take().unwrap().join().unwrap();
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

fn turn(scheduler: &mut Scheduler<Fake>) {
    assert!(scheduler.receive());
    scheduler.turn();
}

impl Running {
    /// What has come since the first token is what follows `prompt`.
    fn assert_untouched(&self, prompt: &[u32]) {
        let tokens: Vec<_> = self.replies.try_iter().map(|reply| reply.unwrap().event.token_id).collect();
        assert_eq!(tokens, expected(prompt, tokens.len() + 1)[1..], "the row is not touched by the others");
    }

    fn finish(&self) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        loop {
            let reply = self.replies.recv_timeout(Duration::from_mins(1)).expect("the loop goes on")?;
            self.backlog.take();
            tokens.push(reply.event.token_id);
            if reply.event.finish_reason.is_some() {
                return Ok(tokens);
            }
        }
    }
}

fn of_length(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::default() }
}

/// What `prompt` goes on with.
fn expected(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..n {
        tokens.push(following(&tokens));
    }
    tokens.split_off(prompt.len())
}

#[test]
fn one_row_takes_exactly_its_steps() {
    let harness = Harness::new();
    let running = harness.start(&[7, 8, 9], &of_length(20));
    assert_eq!((running.finish().unwrap(), running.progress.tokens()), (expected(&[7, 8, 9], 20), 3));
    assert_eq!(harness.start(&[7], &of_length(1)).finish().unwrap(), expected(&[7], 1));
    let seen = harness.end();
    // A length is known beforehand, so no step is wasted; a prompt of one token has nothing to read before it.
    assert_eq!((seen.steps, seen.begun, seen.prefills, seen.sequences), (21, vec![1, 1], 1, 0));
}

#[test]
fn a_stop_wastes_at_most_one_step() {
    let harness = Harness::new();
    let all = expected(&[3, 4], 200);
    let (at, stop) = (1..all.len()).map(|i| (i, all[i])).find(|(i, t)| !all[..*i].contains(t)).unwrap();
    let params = SamplingParams { stop_token_ids: vec![stop], ..of_length(200) };
    assert_eq!(harness.start(&[3, 4], &params).finish().unwrap(), all[..=at]);
    let seen = harness.end();
    assert!(seen.steps <= at + 2, "{} steps for {} tokens", seen.steps, at + 1);
}

#[test]
fn rows_that_join_and_leave_do_not_touch_each_other() {
    let harness = Harness::new();
    let prompts: Vec<Vec<u32>> = (0..20).map(|i| (0..=i % 7).map(|j| (i * 13 + j * 5) % VOCAB).collect()).collect();
    let running: Vec<_> = (0..).zip(&prompts).map(|(i, p)| harness.start(p, &of_length(1 + i * 7 % 40))).collect();
    for (i, (running, prompt)) in running.iter().zip(&prompts).enumerate() {
        assert_eq!(running.finish().unwrap(), expected(prompt, 1 + i * 7 % 40), "request {i}");
    }
    let seen = harness.end();
    assert_eq!(seen.sequences, 0);
    assert_eq!(seen.begun.iter().max(), Some(&3), "the rest waits");
}

#[test]
fn a_row_whose_record_is_an_error_ends_alone() {
    let harness = Harness::new();
    let (bad, good) = ([1, 2], [1, 3]);
    let tokens = expected(&bad, 100);
    // One that only this row meets.
    let other = expected(&good, 100);
    let poison = *tokens.iter().find(|token| !other.contains(token)).expect("the texts differ");
    harness.seen.lock().unwrap().poison = Some(poison);
    let (bad, good) = (harness.start(&bad, &of_length(100)), harness.start(&good, &of_length(100)));
    let error = bad.finish().unwrap_err().to_string();
    assert!(error.starts_with("logits: expected numbers below infinity"), "{error}");
    assert_eq!(good.finish().unwrap(), other);
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn cancelled_and_dropped_rows_leave_within_a_step() {
    let harness = Harness::new();
    let stays = harness.start(&[5], &of_length(ENDLESS));
    let cancelled = harness.start(&[6], &of_length(ENDLESS));
    let dropped = harness.start(&[7], &of_length(ENDLESS));
    let queued = harness.start(&[8], &of_length(5));
    for running in [&cancelled, &dropped] {
        running.replies.recv().unwrap().unwrap();
    }
    drop(dropped);
    assert_eq!(queued.finish().unwrap(), expected(&[8], 5), "the place of one that is gone is taken");
    cancelled.cancel.cancel();
    let end = cancelled.replies.iter().find_map(Result::err).expect("it ends with an error");
    assert!(matches!(end, Error::Cancelled));
    let tokens: Vec<_> = stays.replies.iter().take(500).map(|reply| reply.unwrap().event.token_id).collect();
    assert_eq!(tokens, expected(&[5], 500));
    drop(stays);
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn a_request_that_was_cancelled_before_its_turn_costs_nothing() {
    let harness = Harness::new();
    let first = harness.start(&[5, 6], &of_length(300));
    let second = harness.start(&[6, 7], &of_length(300));
    second.cancel.cancel();
    assert!(matches!(second.finish(), Err(Error::Cancelled)));
    assert_eq!(first.finish().unwrap(), expected(&[5, 6], 300));
    harness.end();
}

#[test]
fn a_row_whose_reader_is_behind_waits_for_it() {
    let harness = Harness::new();
    let slow = harness.start_limited(&[1, 2, 3], &of_length(300), 10);
    assert_eq!(harness.start(&[9], &of_length(600)).finish().unwrap(), expected(&[9], 600));
    let ahead = slow.backlog.unread.load(Ordering::Relaxed);
    // One more step is on its way when the limit is met.
    assert!((10..=11).contains(&ahead), "{ahead} events ahead");
    thread::sleep(4 * POLL);
    assert_eq!(slow.backlog.unread.load(Ordering::Relaxed), ahead, "it stands still");
    assert_eq!(slow.finish().unwrap(), expected(&[1, 2, 3], 300));
    // One that is never read ends with its cancel, though nothing else wakes the loop.
    let unread = harness.start_limited(&[4], &of_length(ENDLESS), 5);
    thread::sleep(4 * POLL);
    unread.cancel.cancel();
    assert!(unread.replies.iter().any(|reply| matches!(reply, Err(Error::Cancelled))));
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn rows_that_nobody_reads_do_not_keep_others_waiting() {
    let harness = Harness::new();
    let unread: Vec<_> = (0..3).map(|i| harness.start_limited(&[i, 7], &of_length(300), 10)).collect();
    harness.wait_until(|| unread.iter().all(|row| row.backlog.is_full()));
    // All places are taken, and whoever reads those rows wants this first.
    assert_eq!(harness.start(&[9], &of_length(5)).finish().unwrap(), expected(&[9], 5));
    assert_eq!(harness.score(&[1, 2, 3], 0, &Cancel::default()).recv().unwrap().unwrap().len(), 2);
    for (i, row) in (0..).zip(&unread) {
        assert_eq!(row.finish().unwrap(), expected(&[i, 7], 300));
    }
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn jobs_take_turns_with_steps() {
    let harness = Harness::new();
    let running = harness.start(&[2, 2], &of_length(400));
    running.replies.recv().unwrap().unwrap();
    let scores = harness.score(&[10, 11, 12, 20], 2, &Cancel::default()).recv().unwrap().unwrap();
    assert_eq!(scores.len(), 3);
    let sum = 3f64.exp() + f64::from(VOCAB - 1);
    for (score, (token, rank, logit)) in scores.iter().zip([(11, 1, 3.0), (12, 1, 3.0), (20, 21, 0.0)]) {
        assert_eq!((score.chosen.token_id, score.chosen.rank, score.top.len()), (token, rank, 2));
        assert!((f64::from(score.chosen.logprob) - (logit - sum.ln())).abs() < 1e-5);
    }
    let nothing = harness.score(&[1], 0, &Cancel::default()).recv().unwrap().unwrap();
    assert!(nothing.is_empty(), "nothing follows a lone token");
    let mut tokens = running.finish().unwrap();
    tokens.insert(0, expected(&[2, 2], 1)[0]);
    assert_eq!(tokens, expected(&[2, 2], 400));
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn prompt_logprobs_come_with_the_first_token() {
    let harness = Harness::new();
    let params = SamplingParams { prompt_logprobs: Some(1), ..of_length(3) };
    let running = harness.start(&[10, 11, 30], &params);
    let first = running.replies.recv().unwrap().unwrap();
    let ranks: Vec<_> = first.prompt_logprobs.unwrap().iter().map(|score| score.chosen.rank).collect();
    assert_eq!((ranks, running.progress.tokens()), (vec![1, 31], 3));
    assert_eq!(first.event.token_id, expected(&[10, 11, 30], 1)[0]);
    assert!(running.replies.recv().unwrap().unwrap().prompt_logprobs.is_none());
    harness.end();
}

#[test]
fn an_error_that_passes_ends_those_it_met() {
    let harness = Harness::new();
    let running = [harness.start(&[1], &of_length(ENDLESS)), harness.start(&[2], &of_length(ENDLESS))];
    for running in &running {
        running.replies.recv().unwrap().unwrap();
    }
    harness.seen.lock().unwrap().fails = true;
    for running in &running {
        assert_eq!(running.finish().unwrap_err().to_string(), "a fake step failed: the test wants it");
    }
    harness.seen.lock().unwrap().fails = false;
    assert_eq!(harness.start(&[3], &of_length(4)).finish().unwrap(), expected(&[3], 4));
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn a_broken_device_refuses_all_later_requests_with_the_reason() {
    let harness = Harness::new();
    let running: Vec<_> = (0..5).map(|i| harness.start(&[i, i + 1], &of_length(ENDLESS))).collect();
    running[0].replies.recv().unwrap().unwrap();
    {
        let mut seen = harness.seen.lock().unwrap();
        (seen.fails, seen.broken) = (true, true);
    }
    for running in &running {
        assert_eq!(running.finish().unwrap_err().to_string(), "a fake step failed: the test wants it");
    }
    let later = harness.start(&[3], &of_length(4)).finish().unwrap_err();
    assert_eq!(later.to_string(), "a fake step failed: the test wants it");
    let job = harness.score(&[1, 2], 0, &Cancel::default()).recv().unwrap().unwrap_err();
    assert_eq!(job.to_string(), "a fake step failed: the test wants it");
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn the_loop_ends_with_the_last_who_could_ask() {
    let harness = Harness::new();
    drop(harness.start(&[1], &of_length(ENDLESS)));
    harness.end();
    let (sender, inbox) = mpsc::channel();
    drop(sender);
    Scheduler::new(Fake::new(&Arc::default()), inbox, SIZES, scorer()).run();
}

#[test]
fn a_cancelled_row_is_gone_after_the_next_turn() {
    let (harness, mut scheduler) = Harness::by_turns();
    let rows = [harness.start(&[1, 2], &of_length(ENDLESS)), harness.start(&[3], &of_length(ENDLESS))];
    let mut turn = || {
        turn(&mut scheduler);
        let seen = harness.seen.lock().unwrap();
        (seen.steps, seen.sequences, seen.begun.clone())
    };
    let (before, _, _) = (0..20).map(|_| turn()).last().unwrap();
    rows[0].cancel.cancel();
    let (after, sequences, begun) = turn();
    // The step that was on its way is read; the next one is without the row.
    assert_eq!((after, sequences, begun), (before + 1, 1, vec![1, 2, 1]));
    drop(rows);
    turn();
    assert_eq!(turn().1, 0);
}

#[test]
fn other_rows_have_steps_between_the_parts_of_a_long_prompt() {
    let harness = Harness::new();
    let running = harness.start_endless(&[5]);
    let prompt: Vec<u32> = (0..950).map(|i| i * 7 % VOCAB).collect();
    let before = harness.seen.lock().unwrap().steps;
    let params = SamplingParams { prompt_logprobs: Some(0), ..of_length(3) };
    let long = [harness.start(&prompt, &of_length(3)), harness.start(&prompt, &params)];
    for long in &long {
        let first = long.replies.recv().unwrap().unwrap();
        assert_eq!(first.event.token_id, expected(&prompt, 1)[0]);
        if let Some(scores) = first.prompt_logprobs {
            let found: Vec<_> = scores.iter().map(|score| score.chosen.token_id).collect();
            assert_eq!(found, prompt[1..]);
        }
        assert_eq!(long.progress.tokens(), 950);
    }
    let steps = harness.seen.lock().unwrap().steps - before;
    // Two prompts of ten parts.
    assert!(steps >= 18 * STEPS_A_PART, "{steps} steps");
    running.assert_untouched(&[5]);
    // One that is cancelled on the way.
    let cancelled = harness.start(&prompt, &of_length(ENDLESS));
    harness.wait_until(|| cancelled.progress.tokens() > 0);
    cancelled.cancel.cancel();
    assert!(matches!(cancelled.finish(), Err(Error::Cancelled)));
    drop(running);
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn other_rows_have_steps_between_the_parts_of_a_job() {
    let harness = Harness::new();
    let running = harness.start_endless(&[5]);
    let text: Vec<u32> = (0..951).map(|i| i * 7 % VOCAB).collect();
    let steps = || harness.seen.lock().unwrap().steps;
    let before = steps();
    let scores = [(); 2].map(|()| harness.score(&text, 0, &Cancel::default()));
    for scores in scores {
        let found: Vec<_> = scores.recv().unwrap().unwrap().iter().map(|score| score.chosen.token_id).collect();
        assert_eq!(found, text[1..]);
    }
    let between = steps() - before;
    // Two texts of ten parts, the last of each a half.
    assert!(between >= 18 * STEPS_A_PART, "{between} steps");
    // One that is cancelled on the way, and one that fails there.
    let cancel = Cancel::default();
    let cancelled = harness.score(&text, 0, &cancel);
    let prefills = || harness.seen.lock().unwrap().prefills;
    let read = prefills();
    harness.wait_until(|| prefills() > read);
    cancel.cancel();
    assert!(matches!(cancelled.recv().unwrap(), Err(Error::Cancelled)));
    running.assert_untouched(&[5]);
    harness.seen.lock().unwrap().fails = true;
    let error = harness.score(&text, 0, &Cancel::default()).recv().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "a fake step failed: the test wants it");
    drop(running);
    assert_eq!(harness.end().sequences, 0);
}

#[test]
fn a_job_that_was_cancelled_before_its_turn_reads_nothing() {
    let harness = Harness::new();
    let cancel = Cancel::default();
    cancel.cancel();
    assert!(matches!(harness.score(&[1, 2], 0, &cancel).recv().unwrap(), Err(Error::Cancelled)));
    assert_eq!(harness.end().prefills, 0);
}

#[test]
fn a_cancelled_text_does_not_wait_for_the_steps_that_rows_are_owed() {
    let (harness, mut scheduler) = Harness::by_turns();
    let row = harness.start(&[3], &of_length(ENDLESS));
    let mut turn = || {
        turn(&mut scheduler);
        let seen = harness.seen.lock().unwrap();
        (seen.prefills, seen.sequences)
    };
    for _ in 0..5 {
        turn();
    }
    let cancel = Cancel::default();
    let scores = harness.score(&[1; 1000], 0, &cancel);
    // A part is read two tokens at a time.
    assert_eq!(turn(), (SIZES.part_tokens / 2, 2), "one part");
    assert_eq!(turn(), (SIZES.part_tokens / 2, 2), "a step that is owed");
    cancel.cancel();
    assert_eq!(turn(), (SIZES.part_tokens / 2, 1));
    assert!(matches!(scores.try_recv(), Ok(Err(Error::Cancelled))));
    drop(row);
}

#[test]
fn parts_whose_logits_come_to_the_host_are_shorter() {
    let sizes = Sizes { part_tokens: 8192, ..SIZES };
    let request = |prompt_logprobs| {
        let (_, request) = request(&[1, 2], &SamplingParams { prompt_logprobs, ..of_length(1) });
        Prompt::new(0u32, Box::new(request)).part_tokens(sizes)
    };
    assert_eq!([None, Some(0), Some(5)].map(request), [8192, HOST_PART_TOKENS, HOST_PART_TOKENS]);
    assert_eq!(SIZES.host_part_tokens(), SIZES.part_tokens);
}
