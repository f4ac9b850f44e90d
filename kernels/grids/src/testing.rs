//! Tiles in one process, for tests here and in crates that use tiles.
use std::collections::BTreeMap;

use kernels::cpu::Isa;
use kernels::threads::Threads;

use crate::fused::{BLOCK, STEPS_MAX};
use crate::grid::Grid;
use crate::halo::links;
use crate::region::Region;
use crate::rule::Rule;
use crate::tile::Tile;

/// Sets a cell's fields from its global coordinates.
pub type Init<'a> = &'a dyn Fn([usize; 3], &mut [f32]);

/// Tiles in one process that exchange halo strips as nodes would.
pub struct Mesh {
    /// The tiles.
    pub tiles: Vec<Tile>,
    /// By tile, the peer and the shift of each link.
    pub(crate) links: Vec<Vec<(usize, [i8; 3])>>,
    depth: usize,
    threads: Threads,
}

impl Mesh {
    /// Links tiles of these regions. Halo depth, number of threads and instruction set as given.
    ///
    /// # Panics
    /// A tile cannot be made.
    pub fn new(grid: &Grid, rule: &Rule, regions: &[Region], (depth, threads, isa): (usize, usize, Isa)) -> Self {
        let (mut tiles, mut all) = (Vec::new(), Vec::new());
        for (me, &region) in regions.iter().enumerate() {
            let mut tile = Tile::with_isa(grid, rule, region, depth, isa).unwrap();
            // Tiles this small would not use fused steps by default.
            if tile.stepper.row_wise().is_some() && tile.frame.size[0] >= 4 * BLOCK {
                tile.fused = STEPS_MAX;
            }
            let links = links(grid, regions, me, depth * rule.radius());
            tile.link(&links.iter().map(|(_, link)| *link).collect::<Vec<_>>()).unwrap();
            all.push(links.iter().map(|(peer, link)| (*peer, link.shift)).collect());
            tiles.push(tile);
        }
        Self { tiles, links: all, depth, threads: Threads::new(threads).unwrap() }
    }

    /// Loads all cells.
    pub fn load(&mut self, init: Init) {
        self.tiles.iter_mut().for_each(|tile| tile.load(&mut |at, cell| init(at, cell)));
    }

    /// Packs all halo strips; keys are the sender, the receiver, and the shift from the receiver's side.
    fn packed(&self) -> BTreeMap<(usize, usize, [i8; 3]), Vec<u8>> {
        let mut strips = BTreeMap::new();
        for (me, tile) in self.tiles.iter().enumerate() {
            for (number, &(peer, shift)) in self.links[me].iter().enumerate() {
                let strip = tile.pack(number).unwrap();
                assert_eq!(strip.len(), tile.bytes_out(number).unwrap());
                strips.insert((me, peer, shift.map(|shift| -shift)), strip);
            }
        }
        strips
    }

    fn unpack(&mut self, strips: &BTreeMap<(usize, usize, [i8; 3]), Vec<u8>>) {
        for (me, tile) in self.tiles.iter_mut().enumerate() {
            for (number, &(peer, shift)) in self.links[me].iter().enumerate() {
                if tile.bytes_in(number).unwrap() > 0 {
                    tile.unpack(number, &strips[&(peer, me, shift)]).unwrap();
                }
            }
        }
    }

    /// Disables fused steps.
    pub fn single_steps(&mut self) {
        self.tiles.iter_mut().for_each(|tile| tile.fused = 1);
    }

    /// Computes `steps` steps. The last pass of every cycle is split, boundary strips first.
    ///
    /// # Panics
    /// A tile rejects a step or a halo strip.
    pub fn advance(&mut self, steps: usize) {
        if self.tiles.len() == 1 {
            return self.tiles[0].advance(&mut self.threads, steps).unwrap();
        }
        self.unpack(&self.packed());
        let mut done = 0;
        while done < steps {
            let now = self.depth.min(steps - done);
            done += now;
            if now < self.depth {
                self.tiles.iter_mut().for_each(|tile| tile.advance(&mut self.threads, now).unwrap());
                break;
            }
            for tile in &mut self.tiles {
                tile.advance(&mut self.threads, now - tile.tail()).unwrap();
                tile.strips(&mut self.threads).unwrap();
            }
            let strips = self.packed();
            self.tiles.iter_mut().for_each(|tile| tile.interior(&mut self.threads).unwrap());
            self.unpack(&strips);
        }
    }

    /// The state hash of the grid.
    ///
    /// # Panics
    /// A step is half computed.
    pub fn hash(&mut self) -> u128 {
        let threads = &mut self.threads;
        self.tiles.iter().fold(0, |sum: u128, tile| sum.wrapping_add(tile.state_hash(threads).unwrap()))
    }
}
