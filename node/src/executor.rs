//! The one thread that computes: it owns the loaded stages and runs what the core asks for, in order.
use crate::driver::DriverHandle;
use crate::residency::{Key, Residency};
use crate::tensors::{Tensor, Tensors};
use kernels::sampler::{Changes, SamplerSettings};
use kernels::stage::{Draw, Rows, RowsIn, RowsOut, Stage, StageError, Want};
use node_core::id::{Epoch, JobId, LoadId, RequestId, WorkId};
use node_core::input::Input;
use node_core::limits::CHALLENGE_STEPS;
use node_core::work::serve::{Item, ItemResult, SampleSpec, Sampling};
use node_core::work::{Loaded, Made, Payload};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// What a stage needs besides weights and caches: activations of one prefill chunk of a wide model, and logits.
pub const SCRATCH_BYTES: u64 = 16 << 20;

/// Something for the executor.
pub enum Command {
    /// A stage was loaded.
    Install {
        /// Which.
        key: Key,
        /// The epoch it was loaded for.
        epoch: Epoch,
        /// The order that is answered.
        load: LoadId,
        /// The stage.
        stage: Box<dyn Stage>,
        /// What the plan allows it: caches grow into that as they are used.
        bytes_max: u64,
    },
    /// A stage stays, under another epoch.
    Keep {
        /// Which.
        key: Key,
        /// The epoch from now on.
        epoch: Epoch,
    },
    /// Drop a stage, if it is here.
    Drop {
        /// Which.
        key: Key,
    },
    /// Drop all stages of a job.
    Unload {
        /// The job.
        job: JobId,
    },
    /// Free a request's cache.
    Release {
        /// Of which stage.
        key: Key,
        /// The request.
        request: RequestId,
    },
    /// Run some steps on rows drawn from a number.
    Challenge {
        /// Of which stage.
        key: Key,
        /// The epoch it belongs to.
        epoch: Epoch,
        /// What the rows are drawn from.
        nonce: u64,
    },
    /// Run a batch.
    Run {
        /// Named in the answer.
        work: WorkId,
        /// Of which stage.
        key: Key,
        /// The epoch it belongs to: a stage of another epoch refuses it.
        epoch: Epoch,
        /// The batch.
        items: Vec<Item>,
    },
}

/// Starts the executor thread. It ends when the sender is dropped.
pub fn spawn(
    tensors: Arc<Tensors>,
    residency: Arc<Residency>,
    driver: DriverHandle,
) -> std::io::Result<(mpsc::Sender<Command>, JoinHandle<()>)> {
    let (sender, commands) = mpsc::channel();
    let executor = Executor { stages: HashMap::new(), tensors, residency, driver };
    let thread = std::thread::Builder::new().name("executor".into()).spawn(move || executor.run(&commands))?;
    Ok((sender, thread))
}

struct Executor {
    stages: HashMap<Key, (Epoch, Box<dyn Stage>)>,
    tensors: Arc<Tensors>,
    residency: Arc<Residency>,
    driver: DriverHandle,
}

impl Executor {
    fn run(mut self, commands: &mpsc::Receiver<Command>) {
        while let Ok(command) = commands.recv() {
            match command {
                Command::Install { key, epoch, load, stage, bytes_max } => {
                    let installed = || self.install(key, epoch, load, stage, bytes_max);
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(installed)) {
                        self.failed(key, load, panic_text(panic.as_ref()));
                    }
                }
                Command::Keep { key, epoch } => {
                    if let Some((held, _)) = self.stages.get_mut(&key) {
                        *held = epoch;
                    }
                }
                Command::Drop { key } => self.drop_stages(|held| held == key),
                Command::Unload { job } => self.drop_stages(|(of, _)| of == job),
                Command::Release { key, request } => {
                    // A stage that is broken says so at its next batch.
                    if let Some((_, stage)) = self.stages.get_mut(&key) {
                        let _ = catch_unwind(AssertUnwindSafe(|| stage.release(request.0)));
                    }
                }
                Command::Challenge { key: (job, part), epoch, nonce } => {
                    let answer = catch_unwind(AssertUnwindSafe(|| self.challenge((job, part), epoch, nonce)));
                    let result = answer.unwrap_or_else(|panic| Err(panic_text(panic.as_ref())));
                    self.driver.input(Input::Challenged { job, epoch, part, nonce, result });
                }
                Command::Run { work, key: (job, part), epoch, items } => {
                    // What panics must not take the node with it: the stage is reported failed and loaded again.
                    let computed = catch_unwind(AssertUnwindSafe(|| self.compute((job, part), epoch, &items)));
                    let results = computed.unwrap_or_else(|panic| Err(panic_text(panic.as_ref())));
                    self.driver.input(Input::Ran { job, part, work, result: results.map(Made::Batch) });
                }
            }
        }
    }

    fn install(&mut self, key: Key, epoch: Epoch, load: LoadId, stage: Box<dyn Stage>, bytes_max: u64) {
        let now = stage.resident_bytes();
        let bytes = bytes_max.max(now.weights + now.working);
        self.stages.insert(key, (epoch, stage));
        // In this order: a plan that is made after the job is ready counts what it takes.
        self.driver.input(Input::CapacityChanged(self.residency.resident(key, Some(bytes))));
        let ((job, part), result) = (key, Ok(Loaded { bytes, step: None }));
        self.driver.input(Input::Loaded { job, part, load, result });
    }

    fn failed(&mut self, key: Key, load: LoadId, reason: String) {
        self.stages.remove(&key);
        if let (_, Some(offered)) = self.residency.fail(key, load, || {}) {
            self.driver.input(Input::CapacityChanged(offered));
        }
        let (job, part) = key;
        self.driver.input(Input::Loaded { job, part, load, result: Err(reason) });
    }

    fn drop_stages(&mut self, is_gone: impl Fn(Key) -> bool) {
        for (key, stage) in self.stages.extract_if(|key, _| is_gone(*key)) {
            drop(stage);
            self.driver.input(Input::CapacityChanged(self.residency.resident(key, None)));
        }
    }

    /// The stage of a key, if it is held under this epoch.
    fn stage(&mut self, key: Key, epoch: Epoch) -> Result<&mut dyn Stage, String> {
        let (held, stage) = self.stages.get_mut(&key).ok_or("this stage of the job is not loaded")?;
        if *held != epoch {
            return Err(format!("the stage was loaded for epoch {}, not {}", held.counter, epoch.counter));
        }
        Ok(stage.as_mut())
    }

    /// A digest of what the stage makes of some rows, one after the other: equal wherever the numerics are.
    fn challenge(&mut self, key: Key, epoch: Epoch, nonce: u64) -> Result<u64, String> {
        let stage = self.stage(key, epoch)?;
        let digest = challenge(stage, nonce);
        stage.release(CHALLENGE_SEQUENCE);
        digest.map_err(|e| e.to_string())
    }

    fn compute(&mut self, key: Key, epoch: Epoch, items: &[Item]) -> Result<Vec<ItemResult>, String> {
        let inputs: Vec<Option<Tensor>> = items.iter().map(|item| self.take(&item.input)).collect();
        let stage = self.stage(key, epoch)?;
        let batch = items.iter().zip(&inputs).map(|(item, input)| rows(item, input)).collect::<Result<Vec<_>, _>>()?;
        let outputs = stage.forward(&batch).map_err(|e| e.to_string())?;
        Ok(items.iter().zip(outputs).map(|(item, output)| self.result(item, output)).collect())
    }

    fn take(&self, payload: &Payload) -> Option<Tensor> {
        match payload {
            Payload::Tensor(id) => self.tensors.take(*id),
            Payload::Tensors(ids) => join(ids.iter().map(|id| self.tensors.take(*id)).collect()),
            Payload::Tokens(tokens) => Some(Tensor::Tokens(tokens.clone())),
        }
    }

    fn result(&self, item: &Item, output: RowsOut) -> ItemResult {
        match output {
            RowsOut::Hidden(rows) => {
                self.tensors.put(item.output, Tensor::Hidden(Arc::new(rows)));
                ItemResult::Hidden
            }
            RowsOut::Token(token) => ItemResult::Token { token },
            RowsOut::Logits(_) | RowsOut::Nothing => ItemResult::Nothing,
        }
    }
}

/// The sequence of a challenge: no request has this number.
const CHALLENGE_SEQUENCE: u64 = u64::MAX;

/// Runs [`CHALLENGE_STEPS`] single rows, drawn from `nonce`, at consecutive positions, and hashes the bits that come out.
fn challenge(stage: &mut dyn Stage, nonce: u64) -> Result<u64, StageError> {
    let seed = blake3::derive_key("meshnode 2026 rows of a challenge", &nonce.to_le_bytes());
    let mut bytes = vec![0; stage.width()];
    blake3::Hasher::new_keyed(&seed).finalize_xof().fill(&mut bytes);
    // A byte an element: from -1 to just below 1, as normalised rows are.
    let hidden: Vec<f32> = bytes.iter().map(|&byte| (f32::from(byte) - 128.0) / 128.0).collect();
    let mut digest = blake3::Hasher::new();
    for position in 0..CHALLENGE_STEPS {
        let row = |input| Rows {
            sequence: CHALLENGE_SEQUENCE,
            position: position as usize,
            input,
            want: if position + 1 == CHALLENGE_STEPS { Want::Logits } else { Want::Nothing },
        };
        // Every vocabulary has that many tokens.
        let token = [u32::from(bytes[position as usize])];
        // A stage says what it takes by refusing the other, which changes nothing in it.
        let outputs = match stage.forward(&[row(RowsIn::Hidden(&hidden))]) {
            Err(StageError::Input(_)) => stage.forward(&[row(RowsIn::Tokens(&token))]),
            answer => answer,
        };
        for output in outputs? {
            if let RowsOut::Hidden(values) | RowsOut::Logits(values) = output {
                for value in values {
                    digest.update(&value.to_bits().to_le_bytes());
                }
            }
        }
    }
    Ok(u64::from_le_bytes(digest.finalize().as_bytes()[..8].try_into().unwrap_or_default()))
}

/// Payloads that were kept apart, one after the other; nothing if any of them is gone or they are not of one kind.
pub fn join(parts: Vec<Option<Tensor>>) -> Option<Tensor> {
    let parts = parts.into_iter().collect::<Option<Vec<Tensor>>>()?;
    parts.into_iter().reduce(|joined, part| match (joined, part) {
        (Tensor::Hidden(mut rows), Tensor::Hidden(more)) => {
            Arc::make_mut(&mut rows).extend_from_slice(&more);
            Tensor::Hidden(rows)
        }
        (Tensor::Tokens(mut tokens), Tensor::Tokens(more)) => {
            tokens.extend(more);
            Tensor::Tokens(tokens)
        }
        // Different kinds never are frames of one stage: an empty payload is refused by the stage, by name.
        (Tensor::Hidden(_) | Tensor::Tokens(_) | Tensor::Halo { .. }, _) => Tensor::Tokens(Vec::new()),
    })
}

fn rows<'a>(item: &'a Item, input: &'a Option<Tensor>) -> Result<Rows<'a>, String> {
    let input = match input {
        Some(Tensor::Tokens(tokens)) => RowsIn::Tokens(tokens),
        Some(Tensor::Hidden(rows)) => RowsIn::Hidden(rows),
        Some(Tensor::Halo { .. }) => return Err("cells of a grid are no rows of a stage".into()),
        None => return Err("the rows of a frame are gone before they were used".into()),
    };
    Ok(Rows {
        sequence: item.request.0,
        position: item.position as usize,
        input,
        want: item.sample.as_ref().map_or(Want::Nothing, want),
    })
}

fn want(sample: &SampleSpec) -> Want<'_> {
    let changes =
        Changes { history: &sample.history, prompt: sample.prompt as usize, bias: &sample.sampling.logit_bias_e6 };
    Want::Token(Draw { settings: settings(&sample.sampling), position: sample.position, changes })
}

fn settings(s: &Sampling) -> SamplerSettings {
    let share = |e6: u32| e6 as f32 / 1e6;
    SamplerSettings {
        temperature: share(s.temperature_e6),
        top_p: share(s.top_p_e6),
        top_k: s.top_k,
        min_p: share(s.min_p_e6),
        repetition_penalty: share(s.repetition_penalty_e6),
        presence_penalty: s.presence_penalty_e6 as f32 / 1e6,
        frequency_penalty: s.frequency_penalty_e6 as f32 / 1e6,
        seed: s.seed,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a kernel panicked: {}", text.unwrap_or("no message"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_that_came_apart_are_one_and_a_missing_one_is_noticed() {
        let rows = |values: &[f32]| Some(Tensor::Hidden(Arc::new(values.to_vec())));
        assert_eq!(join(vec![rows(&[1.0, 2.0]), rows(&[3.0])]), rows(&[1.0, 2.0, 3.0]));
        assert_eq!(join(vec![rows(&[1.0]), None]), None);
        let tokens = |tokens: &[u32]| Some(Tensor::Tokens(tokens.to_vec()));
        assert_eq!(join(vec![tokens(&[1]), tokens(&[2, 3])]), tokens(&[1, 2, 3]));
    }
}
