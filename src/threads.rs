//! Thread pools of our own. The one that rayon shares between all users does not survive a fork, and its size is not ours.

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// A pool of `threads` threads, or of one a core. It ends when it is dropped.
pub fn pool(threads: Option<usize>) -> Result<ThreadPool> {
    ThreadPoolBuilder::new()
        .num_threads(threads.unwrap_or(0))
        .thread_name(|i| format!("flint-{i}"))
        .build()
        .map_err(|why| Error::Unavailable { what: "a thread pool".into(), why: why.to_string() })
}
