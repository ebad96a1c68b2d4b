//! Tasks on all threads of the current pool.

use std::{
    marker::PhantomData,
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::{cancel::Cancel, error::Result};

/// Runs `task` for each index below `n`, on the threads of the pool that this is called in. Threads draw indices from a common
/// counter, so uneven tasks and busy cores balance; `init` makes the workspace of a thread that has drawn one. `cancel` is
/// checked before each task, so a task should take milliseconds.
pub fn for_each<S>(
    n: usize,
    cancel: &Cancel,
    init: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, usize) + Sync,
) -> Result<()> {
    cancel.check()?;
    let next = AtomicUsize::new(0);
    let draw = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < n && !cancel.is_cancelled());
    let work = || {
        let mut workspace = None;
        while let Some(i) = draw() {
            task(workspace.get_or_insert_with(&init), i);
        }
    };
    // Not a broadcast: that waits until every thread has come by, also one that the system gives no core to.
    rayon::scope(|scope| {
        for _ in 1..n.min(rayon::current_num_threads()) {
            scope.spawn(|_| work());
        }
        work();
    });
    cancel.check()
}

/// A slice that several tasks write, each its own places.
pub struct Disjoint<'a> {
    start: *mut f32,
    len: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is `slice`, whose callers promise that no two overlap.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    /// Borrows `values` until every task has ended.
    pub fn new(values: &'a mut [f32]) -> Self {
        Self { start: values.as_mut_ptr(), len: values.len(), lifetime: PhantomData }
    }

    /// The values at `range`.
    ///
    /// # Safety
    /// While the result lives, no other result of `slice` may overlap it.
    #[allow(clippy::mut_from_ref, reason = "the caller promises that no two overlap")]
    pub unsafe fn slice(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the borrowed slice by the assertion, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
