//! Implements the tile interface of the rest of the program ([`GridTile`]) for GPU tiles.
use cubecl::prelude::*;
use kernels::threads::Threads;
use kernels_grids::any_tile::{Fields, GridTile, Mark, RowFn};
use kernels_grids::{GridError, Link, Region};

use crate::GpuTile;

impl<R: Runtime> Fields for GpuTile<R> {
    fn region(&self) -> Region {
        self.region()
    }

    fn fields(&self) -> usize {
        self.fields()
    }

    fn rows(&self, fields: &[usize], region: Region, every: usize, row: RowFn<'_>) -> Result<(), GridError> {
        self.read_rows(fields, region, every, row)
    }

    fn living(&self, region: Region, stride: usize) -> Result<Vec<f32>, GridError> {
        self.read_living(region, stride)
    }
}

impl<R: Runtime> GridTile for GpuTile<R> {
    fn steps(&self) -> u64 {
        self.steps()
    }

    fn steps_left(&self) -> usize {
        self.left()
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn wait(&self) -> Result<(), GridError> {
        self.wait()
    }

    fn mark(&self) -> Mark {
        self.mark()
    }

    fn load(&mut self, cell: &mut dyn FnMut([usize; 3], &mut [f32])) -> Result<(), GridError> {
        self.load(cell)
    }

    fn advance(&mut self, _threads: &mut Threads, steps: usize) -> Result<(), GridError> {
        self.advance(steps)
    }

    fn compute_halo_strips(&mut self, _threads: &mut Threads) -> Result<(), GridError> {
        self.strips()
    }

    fn interior(&mut self, _threads: &mut Threads) -> Result<(), GridError> {
        self.interior()
    }

    fn link(&mut self, links: &[Link]) -> Result<(), GridError> {
        self.link(links)
    }

    fn bytes_out(&self, link: usize) -> Result<usize, GridError> {
        self.bytes_out(link)
    }

    fn bytes_in(&self, link: usize) -> Result<usize, GridError> {
        self.bytes_in(link)
    }

    fn pack_into(&mut self, link: usize, strip: &mut Vec<u8>) -> Result<(), GridError> {
        self.pack_into(link, strip)
    }

    fn unpack(&mut self, link: usize, strip: &[u8]) -> Result<(), GridError> {
        self.unpack(link, strip)
    }

    fn save(&self, region: Region) -> Result<Vec<u8>, GridError> {
        self.save(region)
    }

    fn restore(&mut self, region: Region, bytes: &[u8]) -> Result<(), GridError> {
        self.restore(region, bytes)
    }

    fn resume(&mut self, step: u64) {
        self.resume(step);
    }

    fn state_hash(&self, _threads: &mut Threads) -> Result<u128, GridError> {
        self.state_hash()
    }

    fn totals(&self) -> Result<Vec<i128>, GridError> {
        self.totals()
    }

    fn total(&self, field: usize) -> Result<i128, GridError> {
        self.total(field)
    }

    fn force(&self) -> Result<[i128; 3], GridError> {
        self.force()
    }

    fn first_not_finite(&self) -> Result<Option<([usize; 3], usize)>, GridError> {
        self.first_not_finite()
    }
}
