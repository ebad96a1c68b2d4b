//! A sequence of kernels that is launched as one.

use std::{ptr, rc::Rc};

use cudarc::driver::{result, sys};

use super::{Call, Device, failed, function::Module};
use crate::error::{Error, Result};

/// Kernel calls, recorded once and replayed with the same arguments.
pub struct Graph {
    raw: sys::CUgraphExec,
    device: Device,
    _modules: Vec<Rc<Module>>,
}

impl Device {
    /// Records `calls` in their order, each as [`Call::queue`] would launch it, and prepares their replay.
    pub fn graph(&self, calls: &[Call], pdl: bool) -> Result<Graph> {
        const WHAT: &str = "recording a graph";
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`, and nothing else is being recorded: `calls` cannot start it.
        unsafe { result::stream::begin_capture(self.stream(), mode) }.map_err(failed(WHAT))?;
        let queued = calls.iter().try_for_each(|call| call.queue(pdl));
        // SAFETY: the capture was begun above, and ends whatever happened in it.
        let graph = unsafe { result::stream::end_capture(self.stream()) }.map(Recorded);
        queued?;
        let graph = graph.map_err(failed(WHAT))?;
        let nodes = graph.nodes()?;
        if nodes != calls.len() {
            let why = format!("it holds {nodes} nodes for {} kernels", calls.len());
            return Err(Error::Device { what: WHAT.into(), why });
        }
        // SAFETY: `graph` was captured above.
        let raw = unsafe { result::graph::instantiate(graph.0, sys::CUgraphInstantiate_flags(0)) }
            .map_err(failed("preparing a graph"))?;
        let replay =
            Graph { raw, device: self.clone(), _modules: calls.iter().map(|call| Rc::clone(call.module())).collect() };
        // So that the first launch costs what the others do. SAFETY: both were made above and live.
        unsafe { result::graph::upload(replay.raw, self.stream()) }.map_err(failed("preparing a graph"))?;
        Ok(replay)
    }
}

impl Graph {
    /// Queues one replay.
    pub fn launch(&self) -> Result<()> {
        // SAFETY: graph and stream live as long as `self`; the addresses in it are the promise of whoever made the calls.
        unsafe { result::graph::launch(self.raw, self.device.stream()) }.map_err(failed("launching a graph"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated and destroyed once; a running replay ends first.
        let _ = unsafe { result::graph::exec_destroy(self.raw) };
    }
}

/// A captured graph, which is needed only until it is instantiated.
struct Recorded(sys::CUgraph);

impl Recorded {
    fn nodes(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: without an array to fill, only the count is written.
        unsafe { sys::cuGraphGetNodes(self.0, ptr::null_mut(), &raw mut count) }
            .result()
            .map_err(failed("reading a graph"))?;
        Ok(count)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: captured and destroyed once.
        let _ = unsafe { result::graph::destroy(self.0) };
    }
}
