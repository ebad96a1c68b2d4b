//! Waiting for our own threads without the GIL, so that other Python threads run and Ctrl-C is heard.

use std::{
    panic,
    sync::{
        Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::{cancel::Cancel, error::Result};

/// How often a waiting thread looks for signals; far below the time in which Ctrl-C should be heard.
pub const SLICE: Duration = Duration::from_millis(50);

/// How long a cancelled thread is waited for. One that is stuck in the operating system is left to end by itself.
const GRACE: Duration = Duration::from_secs(1);

/// Starts a thread for work that Python waits for.
pub fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> PyResult<JoinHandle<T>> {
    thread::Builder::new()
        .name("flint-rs".into())
        .spawn(work)
        .map_err(|e| PyRuntimeError::new_err(format!("starting a thread: {e}")))
}

/// The result of a thread that is about to end; a panic in it goes on here, and pyo3 makes an exception of it.
pub fn join<T: Send>(py: Python<'_>, worker: JoinHandle<T>) -> T {
    py.detach(|| worker.join()).unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Runs `work` on a thread of its own. Between slices of waiting, `poll` runs on the calling thread; when it or a signal
/// handler raises, `cancel` is set, and the exception goes on once the work has stopped.
pub fn run<T: Send + 'static>(
    py: Python<'_>,
    cancel: &Cancel,
    mut poll: impl FnMut() -> PyResult<()>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (ended, end) = mpsc::channel::<()>();
    let worker = spawn(move || {
        // Dropped when the work ends, in a panic too.
        let _ended = ended;
        work()
    })?;
    // `detach` asks for `Sync` of what it borrows, which a receiver alone is not.
    let end = Mutex::new(end);
    let ends_within = |time| {
        let end = end.lock().unwrap_or_else(PoisonError::into_inner);
        end.recv_timeout(time) == Err(RecvTimeoutError::Disconnected)
    };
    while !py.detach(|| ends_within(SLICE)) {
        if let Err(error) = py.check_signals().and_then(|()| poll()) {
            cancel.cancel();
            py.detach(|| ends_within(GRACE));
            return Err(error);
        }
    }
    Ok(join(py, worker)?)
}
