//! The stated workspace holds what a forward pass allocates.

mod cpu_support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use cpu_support::{Kind, Random, configs, weights};
use flint_rs::{
    cancel::Cancel,
    cpu::{CpuModel, Options, Path, Positions, Precision},
};

/// Counts the bytes in use and their maximum.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(USED.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn workspace_is_as_stated() {
    let mut random = Random::fresh();
    let config = configs(true).remove(2);
    let weights = weights(&mut random, &config, Kind::Nvfp4);
    // Two blocks, so that the state to go back to counts too.
    let tokens = random.tokens(512 + 40, config.vocab_size);
    for path in [Path::Reference, Path::Fast] {
        for precision in [Precision::Float32, Precision::Bfloat16] {
            let options = Options { precision, path, threads: Some(2) };
            let model = CpuModel::new(Arc::clone(&weights), options).unwrap();
            let mut kv = model.new_kv();
            model.forward(&mut kv, &tokens, Positions::None, &Cancel::default()).unwrap();
            let before = USED.load(Relaxed);
            PEAK.store(before, Relaxed);
            model.forward(&mut kv, &tokens, Positions::Last, &Cancel::default()).unwrap();
            let held = PEAK.load(Relaxed) - before;
            let (stated, growth) = (model.workspace_bytes(), kv.bytes());
            assert!(held <= stated + growth, "{path:?} {precision:?}: {held} of {stated}");
            assert!(stated <= 20 * held, "{path:?} {precision:?}: {stated} is no estimate of {held}");
            println!("{path:?} {precision:?}: {held} of {stated}");
        }
    }
}
