//! A running generation as a Python iterator.

use std::{
    process,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread::JoinHandle,
    time::Instant,
};

use pyo3::{
    PyTraverseError, PyVisit,
    exceptions::{PyRuntimeError, PyStopIteration},
    prelude::*,
};

use super::{
    model::check_process,
    results::{self, Summary},
    wait,
};
use crate::{
    cancel::Cancel,
    engine::{Engine, Event, Generation, PromptProgress},
    error::{Error, Result},
    sampling::SamplingParams,
};

/// Events that a stream may be ahead of its reader, so that one that is never read does not run on.
const AHEAD_EVENTS: usize = 16;

/// A generation that was started, with what the engine does not know of it.
pub struct Request {
    generation: Generation,
    prompt_tokens: usize,
    /// When the caller came.
    start: Instant,
}

impl Request {
    /// Starts a generation after checked `tokens`.
    pub fn start(
        engine: &Arc<Engine>,
        tokens: Vec<u32>,
        params: &SamplingParams,
        progress: &PromptProgress,
        cancel: &Cancel,
        start: Instant,
    ) -> Result<Self> {
        let prompt_tokens = tokens.len();
        Ok(Self { generation: engine.generate(tokens, params, progress, cancel)?, prompt_tokens, start })
    }

    /// Generates to the end. `emit` gets every event but the last, and says whether to go on.
    fn run(mut self, engine: &Engine, mut emit: impl FnMut(Event) -> bool) -> Result<(Event, Summary)> {
        while let Some(event) = self.generation.next() {
            let event = event?;
            if event.finish_reason.is_some() {
                let first_token_at = self.generation.first_token_at().unwrap_or(self.start);
                let summary = Summary {
                    prompt_tokens: self.prompt_tokens,
                    prompt_logprobs: self.generation.prompt_logprobs().map(<[_]>::to_vec),
                    seed: self.generation.seed(),
                    load: engine.load_time(),
                    prefill: self.generation.prefill_time(),
                    decode: self.generation.decode_time(),
                    time_to_first_token: first_token_at - self.start,
                };
                return Ok((event, summary));
            }
            if !emit(event) {
                break;
            }
        }
        Err(Error::Cancelled)
    }

    /// Generates to the end.
    pub fn finish(self, engine: &Engine) -> Result<results::Result> {
        let mut events = Vec::new();
        let (last, summary) = self.run(engine, |event| {
            events.push(event.into());
            true
        })?;
        events.push(last.into());
        Ok(results::Result::new(events, summary))
    }
}

enum Message {
    Event(Event),
    End(Result<(Event, Summary)>),
}

/// How far the prompts of a call are, for its callback.
pub struct Progress {
    /// Tokens that were read.
    pub read: PromptProgress,
    /// Tokens of all prompts, once it is known.
    pub total: Arc<AtomicUsize>,
    callback: Option<Py<PyAny>>,
}

impl Progress {
    pub fn new(callback: Option<&Bound<'_, PyAny>>) -> Self {
        let callback = callback.map(|callback| callback.clone().unbind());
        Self { read: PromptProgress::default(), total: Arc::default(), callback }
    }

    /// Calls the callback, while there is a prompt that was not read whole.
    pub fn show(&self, py: Python<'_>) -> PyResult<()> {
        let (read, total) = (self.read.tokens(), self.total.load(Ordering::Relaxed));
        if let (Some(callback), true) = (&self.callback, read < total) {
            callback.call1(py, (read, total))?;
        }
        Ok(())
    }
}

/// What has arrived from the worker so far.
struct Inbox {
    /// `None` once the generation has ended or was cancelled.
    messages: Option<Receiver<Message>>,
    worker: Option<JoinHandle<()>>,
    events: Vec<results::Event>,
    result: Option<results::Result>,
}

enum Poll {
    Event(results::Event),
    Nothing,
    Ended,
    Failed(Error),
    Panicked(JoinHandle<()>),
}

impl Inbox {
    /// Waits one slice for the next message.
    fn poll(&mut self) -> Poll {
        let Some(messages) = &self.messages else { return Poll::Ended };
        let message = messages.recv_timeout(wait::SLICE);
        if !matches!(message, Ok(Message::Event(_)) | Err(RecvTimeoutError::Timeout)) {
            self.messages = None;
        }
        match message {
            Ok(Message::Event(event)) => Poll::Event(self.keep(event)),
            Ok(Message::End(Ok((event, summary)))) => {
                let event = self.keep(event);
                self.result = Some(results::Result::new(self.events.clone(), summary));
                Poll::Event(event)
            }
            Ok(Message::End(Err(error))) => Poll::Failed(error),
            Err(RecvTimeoutError::Timeout) => Poll::Nothing,
            Err(RecvTimeoutError::Disconnected) => self.worker.take().map_or(Poll::Ended, Poll::Panicked),
        }
    }

    fn keep(&mut self, event: Event) -> results::Event {
        let event = results::Event::from(event);
        self.events.push(event.clone());
        event
    }
}

/// An iterator of events. Its work ends with it.
#[pyclass(frozen, module = "flint_rs")]
pub struct Stream {
    inbox: Mutex<Inbox>,
    progress: Progress,
    cancel: Cancel,
    closing: Cancel,
    process: u32,
}

impl Stream {
    /// Starts the work of `request` on a thread of its own. `progress` and `cancel` are the request's, `closing` the model's.
    pub fn start(
        engine: Arc<Engine>,
        request: Request,
        progress: Progress,
        cancel: Cancel,
        closing: Cancel,
    ) -> PyResult<Self> {
        request.generation.limit_ahead(AHEAD_EVENTS);
        let (sender, messages) = mpsc::sync_channel(AHEAD_EVENTS);
        let worker = wait::spawn(move || {
            let end = request.run(&engine, |event| sender.send(Message::Event(event)).is_ok());
            // Nobody is left to tell when the stream is gone.
            let _ = sender.send(Message::End(end));
        })?;
        let inbox = Inbox { messages: Some(messages), worker: Some(worker), events: Vec::new(), result: None };
        Ok(Self { inbox: Mutex::new(inbox), progress, cancel, closing, process: process::id() })
    }

    /// Never called with the GIL held: another thread may wait in `poll`.
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the work and waits until it has.
    fn stop(&self, py: Python<'_>) {
        self.cancel(py);
        if let Some(worker) = py.detach(|| self.inbox().worker.take()) {
            wait::join(py, worker);
        }
    }
}

/// From a callback, `StopIteration` would look like the end of the stream; a generator makes the same of it.
fn not_the_end(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyStopIteration>(py) {
        return error;
    }
    let told = PyRuntimeError::new_err("progress raised StopIteration");
    told.set_cause(py, Some(error));
    told
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

#[pymethods]
impl Stream {
    /// The callback may hold what holds the stream: such a circle is garbage too, and its work ends when it is found.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.progress.callback.as_ref().map_or(Ok(()), |callback| visit.call(callback))
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<results::Event>> {
        check_process(self.process)?;
        loop {
            match py.detach(|| self.inbox().poll()) {
                Poll::Event(event) => return Ok(Some(event)),
                Poll::Failed(Error::Cancelled) if self.closing.is_cancelled() => return Err(Error::Closed.into()),
                // Only `cancel`, maybe of another thread, can have asked for it: the iterator just ends.
                Poll::Ended | Poll::Failed(Error::Cancelled) => return Ok(None),
                Poll::Failed(error) => return Err(error.into()),
                Poll::Panicked(worker) => wait::join(py, worker),
                Poll::Nothing => {
                    py.check_signals()
                        .and_then(|()| self.progress.show(py).map_err(|error| not_the_end(py, error)))
                        .inspect_err(|_| self.stop(py))?;
                }
            }
        }
    }

    /// Ends the work; the iterator then ends too. May be called at any time, from any thread.
    fn cancel(&self, py: Python<'_>) {
        self.cancel.cancel();
        if check_process(self.process).is_ok() {
            py.detach(|| self.inbox().messages = None);
        }
    }

    /// The whole generation, once its last event was read; None before, and for ever when it was cancelled.
    #[getter]
    fn result(&self, py: Python<'_>) -> PyResult<Option<results::Result>> {
        check_process(self.process)?;
        Ok(py.detach(|| self.inbox().result.clone()))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        check_process(self.process)?;
        self.stop(py);
        Ok(())
    }
}
