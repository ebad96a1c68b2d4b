//! Opens a crafted file and holds the refusal to what every refusal must be: quick, small, and about the right thing.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    path::Path,
    time::{Duration, Instant},
};

use flint_rs::{checkpoint::Checkpoint, config::FlintConfig};

/// Counts the bytes that a thread has and had at most; readers use one thread.
pub struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    LIVE.set(LIVE.get() + change);
    PEAK.set(PEAK.get().max(LIVE.get()));
}

// SAFETY: all memory comes from and goes back to the system allocator; the counters are plain cells that need none.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise about `pointer` and `layout` is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

const MOST_TIME: Duration = Duration::from_secs(1);
const MOST_BYTES_OVER_FILE: isize = 16 << 20;

/// The error text after the path, of a checkpoint that must be refused; `len` is the size of its files.
pub fn refusal(case: &str, path: &Path, len: usize) -> String {
    let before = LIVE.get();
    PEAK.set(before);
    let start = Instant::now();
    let result = Checkpoint::open(path).and_then(|checkpoint| FlintConfig::from_checkpoint(&checkpoint));
    let (time, peak) = (start.elapsed(), PEAK.get() - before);
    let error = result.map(|_| ()).expect_err(case).to_string();
    assert!(time < MOST_TIME, "{case}: took {time:?}");
    assert!(peak < len as isize + MOST_BYTES_OVER_FILE, "{case}: allocated {peak} bytes for a file of {len}");
    let text = error.split_once(": ").map(|(_, text)| text.to_owned());
    text.unwrap_or_else(|| panic!("{case}: no path in {error:?}"))
}

/// Asserts that the refusal is about `name` and that it says `found`: all of it for a number, else somewhere in it.
pub fn assert_refused(case: &str, path: &Path, len: usize, name: &str, found: &str) {
    let text = refusal(case, path, len);
    assert!(text.starts_with(&format!("{name}: expected ")), "{case}: not about {name:?}: {text}");
    let (_, says) = text.split_once(", found ").unwrap_or_else(|| panic!("{case}: nothing found: {text}"));
    let same = if found.parse::<f64>().is_ok() { says == found } else { says.contains(found) };
    assert!(same, "{case}: does not say {found:?}: {text}");
}
