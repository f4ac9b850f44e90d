//! The router's part for simulations: their tiles at this node, and those of its jobs everywhere.
use super::Node;
use crate::id::{Epoch, JobId, NodeId};
use crate::input::GridInput;
use crate::limits::{HALO_LOG_BYTES_MAX, LEASE, SNAPSHOT_EVERY_MIN};
use crate::message::Message;
use crate::output::{Event, GridCommand, Output};
use crate::tiles::message::TileMessage;
use crate::tiles::{GridJobView, GridOutput, HeldTile, TilesOutput, message};
use crate::work::Payload;
use crate::work::steps::{Inheritance, SaveKind};
use alloc::boxed::Box;
use alloc::vec::Vec;
use partitioner::tiles::{Block, GridQuestion, GridWork, TileStandby, halos_last_ns, standbys};
use partitioner::{DeviceId, Fleet};

impl Node {
    /// Simulations of which this node is the coordinator.
    pub fn grids(&self) -> impl Iterator<Item = GridJobView> + '_ {
        self.grids.views()
    }

    /// Tiles this node holds, of its own simulations and of others'.
    pub fn tiles(&self) -> impl Iterator<Item = HeldTile> + '_ {
        self.tiles.held()
    }

    pub(super) fn route_grid_input(&mut self, input: GridInput) {
        let now = self.now;
        match input {
            GridInput::Submit(spec) => self.grids.handle_submit(*spec),
            GridInput::Plan { call, work, depth, guarded } => self.grids.handle_plan(call, *work, depth, guarded),
            GridInput::Cancel { job } => self.grids.handle_cancel(job),
            GridInput::Planned { token, result } => self.grids.handle_planned(now, token, result),
            GridInput::Loaded { job, tile, load, result } => self.tiles.handle_loaded(now, job, tile, load, result),
            GridInput::Strips { job, tile, work, sizes } => self.tiles.handle_strips(now, job, tile, work, &sizes),
            GridInput::Made { job, tile, work, result } => self.tiles.handle_made(now, job, tile, work, result),
            GridInput::Collected { job, tile, step, kind: SaveKind::Snapshot, result } => {
                self.tiles.handle_collected(now, job, tile, step, result);
            }
            GridInput::Collected { job, tile, step, kind, result } => {
                self.grids.handle_collected(now, job, tile, step, kind, result);
            }
            GridInput::Mirrored { job, step, result } => self.tiles.handle_mirrored(now, job, step, &result),
            GridInput::Kept { job, step, result } => self.grids.handle_kept(now, job, step, result),
        }
    }

    pub(super) fn route_tile_message(&mut self, from: NodeId, job: JobId, epoch: Epoch, say: TileMessage) {
        let now = self.now;
        let failed = self.grids.handle_message(now, from, job, epoch, &say);
        if let Some(unprepared) = failed {
            if unprepared.failed {
                self.failover.handle_stage_failed(now, job, from, true, unprepared.reason);
            } else {
                self.failover.handle_unprepared(now, job, from, &unprepared.reason);
            }
        }
        self.tiles.handle_message(now, from, job, epoch, say);
    }

    pub(super) fn route_tiles(&mut self, output: TilesOutput) {
        let command = match output {
            TilesOutput::Load { job, epoch, load, order } => GridCommand::Load { job, epoch, load, order },
            TilesOutput::Restore { job, load, tile, step } => GridCommand::Restore { job, load, tile, step },
            TilesOutput::Keep { job, epoch, tile } => GridCommand::Keep { job, epoch, tile },
            TilesOutput::Run { run, budget } => {
                self.liveness.handle_work_started(self.now, run.job, budget);
                GridCommand::Run(run)
            }
            TilesOutput::Returned { job } => return self.liveness.handle_work_done(self.now, job),
            TilesOutput::Collect { job, from, tile, step, kind, bytes } => {
                GridCommand::Collect { job, from, tile, step, kind, bytes }
            }
            TilesOutput::Mirror { job, from, step, parts, simulation } => {
                GridCommand::Mirror { job, from, step, parts, simulation }
            }
            TilesOutput::Succeed(inheritance) => return self.succeed(*inheritance),
            TilesOutput::Forget { job, tile, step, kind } => GridCommand::Forget { job, tile, step, kind },
            TilesOutput::Drop { job, tile } => GridCommand::Drop { job, tile },
            TilesOutput::Unload { job } => return self.out.push_back(Output::Unload { job }),
            TilesOutput::Frame { to, header, tensor, copy: _ } if to == self.me => {
                // It will be consumed, and stay where it is for others.
                let also = self.tiles.name();
                self.out.push_back(Output::Grid(GridCommand::Share { tensor, also }));
                return self.send_frame(to, header, Payload::Tensor(also), false);
            }
            TilesOutput::Frame { to, header, tensor, copy } => {
                return self.send_frame(to, header, Payload::Tensor(tensor), copy);
            }
            TilesOutput::Discard { tensor } => return self.discard(tensor),
            TilesOutput::Message { to, job, epoch, say } => return self.send(to, message(job, epoch, say)),
            TilesOutput::Stale { to, job, mine } => return self.send(to, Message::Stale { job, mine }),
            TilesOutput::Watch { job, epoch, nodes } => {
                // Neighbours may never have had anything to say to each other.
                nodes.iter().for_each(|&node| self.membership.connect(self.now, node));
                return self.liveness.handle_watch(self.now, job, epoch, &nodes);
            }
            TilesOutput::Unwatch { job } => return self.liveness.handle_unwatch(job),
            TilesOutput::Refused { from, what } => return self.refused(Some(from), what),
        };
        self.out.push_back(Output::Grid(command));
    }

    pub(super) fn route_grid(&mut self, output: GridOutput) {
        match output {
            GridOutput::Plan { token, job, work, depth, resident, without, paces, present } => {
                let mut fleet = match job {
                    Some(job) => self.fleet_for(job, &resident),
                    None => self.fleet(),
                };
                for device in &mut fleet.devices {
                    device.excluded |= without.contains(&device.id.into());
                }
                let question = GridQuestion { work: *work, fleet, paces, depth, present };
                self.out.push_back(Output::Grid(GridCommand::Plan { token, question: Box::new(question) }));
            }
            GridOutput::PlanFound { call, result, work, guarded } => {
                let found = result.as_ref().ok().filter(|_| guarded);
                let standbys = found.map_or_else(Vec::new, |plan| {
                    let owners: Vec<_> = plan.tiles().iter().map(|tile| (tile.device, tile.block)).collect();
                    guards(&work, &owners, (plan.depth(), plan.step_ns()), &self.fleet(), &[])
                });
                self.notify(Event::GridPlan { call, result, standbys });
            }
            GridOutput::Message { to, job, epoch, say } => self.send(to, message(job, epoch, say)),
            GridOutput::Watch { job, epoch, nodes, standbys } => self.watch(job, epoch, nodes, standbys),
            GridOutput::Standbys { job, work, owners, depth, step_ns, kept, resident, without } => {
                let mut fleet = self.fleet_for(job, &resident);
                for device in &mut fleet.devices {
                    device.excluded |= without.contains(&device.id.into());
                }
                let chosen = guards(&work, &owners, (depth, step_ns), &fleet, &kept);
                self.grids.handle_standbys(self.now, job, &chosen);
            }
            GridOutput::Collect { job, from, tile, step, kind, bytes } => {
                self.out.push_back(Output::Grid(GridCommand::Collect { job, from, tile, step, kind, bytes }));
            }
            GridOutput::KeepCheckpoint { job, step } => {
                self.out.push_back(Output::Grid(GridCommand::KeepCheckpoint { job, step }));
            }
            GridOutput::Unwatch { job } => {
                self.failover.handle_ended(job);
                self.liveness.handle_unwatch(job);
            }
            GridOutput::Notify(event) => self.notify(event),
        }
    }

    /// Goes on with a simulation whose coordinator is silent.
    fn succeed(&mut self, inheritance: Inheritance) {
        let (job, before) = (inheritance.spec.job, inheritance.epoch.minter);
        let participants = inheritance.participants();
        let silent = self.liveness.last_heard(job, before).map_or(LEASE, |(at, _)| self.now.since(at));
        if self.grids.handle_inherited(inheritance) {
            self.failover.handle_inherited(self.now, job, participants, (before, silent));
        }
    }

    /// The epoch of a job of which this node is the head or coordinator.
    pub(super) fn own_epoch(&self, job: JobId) -> Option<Epoch> {
        self.jobs.epoch_of(job).or_else(|| self.grids.epoch_of(job))
    }

    /// Who is the head or coordinator of a job that this node takes part in.
    pub(super) fn head_of(&self, job: JobId) -> Option<(NodeId, Epoch)> {
        self.placement.head_of(job).or_else(|| self.tiles.coordinator_of(job))
    }

    /// These take part in a job of this node's: heartbeats are exchanged with them, their loss is the job's.
    pub(super) fn watch(&mut self, job: JobId, epoch: Epoch, nodes: Vec<NodeId>, standbys: Vec<NodeId>) {
        self.failover.handle_placed(job, epoch, nodes.iter().copied());
        self.failover.handle_standbys(job, standbys.iter().copied());
        let others: Vec<NodeId> = nodes.into_iter().chain(standbys).filter(|&node| node != self.me).collect();
        self.liveness.handle_watch(self.now, job, epoch, &others);
    }
}

/// Who stands by for which tile. Snapshots of warm ones come so often that the halos kept since the last but one would do.
fn guards(
    work: &GridWork,
    owners: &[(DeviceId, Block)],
    (depth, step_ns): (u32, u64),
    fleet: &Fleet,
    kept: &[(u16, DeviceId)],
) -> Vec<TileStandby> {
    let mut chosen = standbys(work, owners, depth, fleet, kept);
    for standby in &mut chosen {
        let block = &owners[usize::from(standby.tile)].1;
        let last = halos_last_ns(work, block, depth, step_ns, HALO_LOG_BYTES_MAX / 2);
        standby.snapshot_every_ns = standby.snapshot_every_ns.min(last.max(SNAPSHOT_EVERY_MIN.as_nanos() as u64));
    }
    chosen
}
