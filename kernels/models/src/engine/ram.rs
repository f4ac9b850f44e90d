//! Experts in RAM: the processor computes them for a device that holds the other experts of their layers.
//!
//! The device chooses the experts of each row, sends the rows, and adds the outputs in their order. An output has the same bits
//! wherever it is computed, so it does not matter which experts lie here.
use std::ops::Range;

use kernels::cpu::Isa;
use kernels::cpu::activations::{Quantise, Rows};
use kernels::order::Activation;
use kernels::order::experts::Choice;
use kernels::pool::Pool;
use kernels::quant::QuantType;
use kernels::threads::Threads;
use kernels::tile::Layout;

use super::experts::Mixture;
use super::{Run, Shared, each_row};
use crate::model::load::{Bank, Gated, Matrix, missing};
use crate::recipe::Recipe;
use crate::stage::{Activations, StageError, StageOptions};
use crate::weights::{ModelFile, TensorView};

/// Most of a layer's experts lie in RAM up to this share of them, before experts of another layer do: each layer with experts in
/// RAM costs an exchange with the device per step, and while the processor computes, the device computes the others.
const SHARE: [u64; 2] = [1, 2];

/// Experts of a layer that stay on the device whatever the options say: this share, and as many as a row uses.
const ON_DEVICE: usize = 8;

/// Experts in RAM, layer by layer.
pub struct RamExperts {
    isa: Isa,
    integers: bool,
    width: usize,
    /// By index within the stage.
    layers: Vec<Option<RamLayer>>,
    x: Rows,
    mixture: Mixture,
    bytes: u64,
}

struct RamLayer {
    activation: Activation,
    bank: Bank,
}

/// A row that an expert in RAM computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// The row.
    pub row: usize,
    /// Place of the expert among those of its layer in RAM.
    pub place: usize,
    /// Its factor for the row.
    pub weight: f32,
}

/// Weights of one expert.
#[derive(Clone, Debug, PartialEq)]
pub struct Expert {
    /// Tiles of gate, up and down.
    pub tiles: [Vec<u8>; 3],
    /// Biases of gate, up and down.
    pub biases: Option<[Vec<f32>; 3]>,
}

/// Writes the tiles of a range of a tensor's rows, which begins at a tile boundary.
pub type Fill<'a> = dyn Fn(&TensorView<'_>, Range<usize>, &mut [u8]) -> Result<(), StageError> + Sync + 'a;

/// Names of the matrices of a layer's experts: gate, up and down.
fn names(layer: usize, kind: &str) -> [String; 3] {
    ["gate", "up", "down"].map(|part| format!("blk.{layer}.ffn_{part}_exps.{kind}"))
}

/// Format, rows and columns of the matrices of one expert of a layer: gate, up and down.
///
/// # Errors
/// A tensor is missing.
pub fn expert_tiles(file: &ModelFile, layer: usize) -> Result<[(QuantType, [usize; 2]); 3], StageError> {
    let count = file.config().experts.map_or(1, |experts| experts.count);
    let tensor = |name: String| {
        let tensor = file.tensor(&name).ok_or_else(|| missing(&name))?;
        Ok::<_, StageError>((tensor.quant, [tensor.rows / count, tensor.cols]))
    };
    let [gate, up, down] = names(layer, "weight");
    Ok([tensor(gate)?, tensor(up)?, tensor(down)?])
}

/// Bytes of one expert of a layer as tiles.
///
/// # Errors
/// A tensor is missing.
pub fn expert_bytes(file: &ModelFile, layer: usize) -> Result<u64, StageError> {
    let bytes = |(kind, [rows, cols]): (QuantType, [usize; 2])| Layout::of(kind).matrix_bytes(rows, cols) as u64;
    Ok(expert_tiles(file, layer)?.into_iter().map(bytes).sum())
}

/// Bytes of an expert of each layer of a stage; 0 for a layer without.
fn bytes_of_layers(file: &ModelFile, options: &StageOptions) -> Result<Vec<u64>, StageError> {
    let experts = file.config().experts;
    let each = options.layers.clone().map(|layer| match experts.filter(|experts| experts.in_layer(layer)) {
        Some(_) => expert_bytes(file, layer),
        None => Ok(0),
    });
    each.collect()
}

/// Maximum number of experts of a layer that lie in RAM.
fn most_in_ram(file: &ModelFile) -> usize {
    let (count, used) = file.config().experts.map_or((0, 0), |experts| (experts.count, experts.used));
    count - count.min(used.max(count / ON_DEVICE))
}

/// Bytes of the experts of a stage that may lie in RAM: the maximum of `options.ram`.
///
/// # Errors
/// A tensor is missing.
pub fn movable_bytes(file: &ModelFile, options: &StageOptions) -> Result<u64, StageError> {
    Ok(most_in_ram(file) as u64 * bytes_of_layers(file, options)?.iter().sum::<u64>())
}

/// Which experts of a stage lie in RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Of each layer, how many.
    pub counts: Vec<usize>,
    /// Bytes of all.
    pub bytes: u64,
}

/// How many experts of each layer of a stage lie in RAM, if at least `options.ram` bytes of them have to.
///
/// # Errors
/// The stage does not have that many bytes of experts that may leave the device, or a tensor is missing.
pub fn experts_in_ram(file: &ModelFile, options: &StageOptions) -> Result<Split, StageError> {
    let mut counts = vec![0; options.layers.len()];
    if options.ram == 0 {
        return Ok(Split { counts, bytes: 0 });
    }
    let count = file.config().experts.map_or(0, |experts| experts.count);
    let (most, each) = (most_in_ram(file), bytes_of_layers(file, options)?);
    let total = |counts: &[usize]| counts.iter().zip(&each).map(|(n, bytes)| *n as u64 * bytes).sum::<u64>();
    let all: u64 = each.iter().map(|bytes| count as u64 * bytes).sum();
    let few = (count as u64 * SHARE[0] / SHARE[1]).max((options.ram * count as u64).div_ceil(all.max(1)));
    let few = usize::try_from(few).unwrap_or(most).min(most);
    for limit in [few, most] {
        for index in (0..counts.len()).rev().filter(|index| each[*index] > 0) {
            let missing = options.ram.saturating_sub(total(&counts)).div_ceil(each[index]);
            let missing = usize::try_from(missing).unwrap_or(most);
            counts[index] = counts[index].saturating_add(missing).min(limit).max(counts[index]);
        }
    }
    let found = total(&counts);
    if found >= options.ram {
        return Ok(Split { counts, bytes: found });
    }
    Err(StageError::Input(format!(
        "{} MiB of experts were to lie in RAM, but these layers have only {} MiB that may: a device holds at least as many experts \
         of each layer as a row uses; give it fewer layers or more memory",
        options.ram.div_ceil(1 << 20),
        found >> 20
    )))
}

impl RamExperts {
    /// Loads experts of the layers of a stage: of each layer the last `counts[index]` ones. `fill` reads their weights.
    ///
    /// # Errors
    /// A tensor is missing or holds a non-finite number, no threads, or no memory.
    pub fn load(
        file: &ModelFile,
        options: &StageOptions,
        counts: &[usize],
        fill: &Fill<'_>,
    ) -> Result<Self, StageError> {
        let config = file.config();
        let recipe = Recipe::of(config);
        let no_threads = |e| StageError::Device(format!("{} compute threads: {e}", options.threads));
        let mut pool = Pool::new(options.threads).map_err(no_threads)?;
        let mut bytes = 0;
        let layer = |(layer, in_ram): (usize, &usize)| -> Result<Option<RamLayer>, StageError> {
            let (Some(experts), true) = (config.experts, *in_ram > 0) else { return Ok(None) };
            let first = experts.count - in_ram;
            let mut matrix = |name: &String| -> Result<Matrix, StageError> {
                let tensor = file.tensor(name).ok_or_else(|| missing(name))?;
                let from = tensor.rows / experts.count * first;
                let fill = |rows: Range<usize>, out: &mut [u8]| fill(&tensor, from + rows.start..from + rows.end, out);
                let matrix = Matrix::filled(&mut pool, tensor.quant, [tensor.rows - from, tensor.cols], &fill)?;
                bytes += matrix.tiles().bytes().len() as u64;
                Ok(matrix)
            };
            let [gate, up, down] = names(layer, "weight");
            let matrices = Gated { inputs: [matrix(&gate)?, matrix(&up)?], down: matrix(&down)? };
            let bias = |name: String| -> Result<Vec<f32>, StageError> {
                let mut bias = file.tensor(&name).ok_or_else(|| missing(&name))?.to_finite_f32()?;
                Ok(bias.split_off(bias.len() / experts.count * first))
            };
            let [gate, up, down] = names(layer, "bias");
            let biases = experts.biases.then(|| Ok::<_, StageError>([bias(gate)?, bias(up)?, bias(down)?]));
            let bank =
                Bank { count: *in_ram, on_input: experts.on_input, biases: biases.transpose()?, experts: matrices };
            Ok(Some(RamLayer { activation: recipe.layers[layer].activation, bank }))
        };
        Ok(Self {
            isa: Isa::detect(),
            integers: options.activations == Activations::Int8,
            width: config.width,
            layers: options.layers.clone().zip(counts).map(layer).collect::<Result<_, _>>()?,
            x: Rows::default(),
            mixture: Mixture::default(),
            bytes,
        })
    }

    /// Bytes of weights in RAM.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Computes the outputs `[pairs, width]` of experts of layer `index` of the stage for normalised rows `[rows, width]`. A factor
    /// is applied only where it is one of the input; else it is that of the output, and the device applies it.
    ///
    /// # Panics
    /// If a row, a place or the layer does not exist, or `out` is too short.
    pub fn compute(&mut self, threads: &mut Threads, index: usize, rows: &[f32], pairs: &[Pair], out: &mut [f32]) {
        let Self { isa, integers, width, layers, x, mixture, .. } = self;
        let RamLayer { activation, bank } = layers[index].as_ref().expect("a layer with experts in RAM");
        let (run, pool) = (Run { isa: *isa, integers: *integers, activation: *activation }, threads.pool());
        let count = rows.len() / *width;
        x.shape(count, *width);
        let places = x.rows_mut();
        each_row(pool, count, 4 * *width, &|i| {
            // SAFETY: each row is visited once; the instruction set was detected.
            unsafe {
                let (floats, blocks) = places.row(i);
                floats[..*width].copy_from_slice(&rows[i * *width..(i + 1) * *width]);
                if *integers {
                    isa.run(Quantise { floats: &floats[..*width], blocks });
                }
            }
        });
        let choice = |pair: &Pair| (pair.row, Choice { expert: pair.place, weight: pair.weight });
        mixture.compute_pairs(pool, run, x, bank, pairs.iter().map(choice));
        for (i, out) in out.chunks_exact_mut(*width).take(pairs.len()).enumerate() {
            out.copy_from_slice(mixture.output(i, *width));
        }
    }

    /// Copies the tiles of experts of layer `index`, one after another: of gate, up or down (`matrix` 0 to 2).
    ///
    /// # Panics
    /// If there are none at these places, or `out` has another length.
    pub fn copy_tiles(&self, threads: &mut Threads, index: usize, matrix: usize, places: Range<usize>, out: &mut [u8]) {
        /// Bytes per unit of work: large enough that threads rarely meet.
        const PIECE: usize = 256 << 10;
        let bank = &self.layers[index].as_ref().expect("a layer with experts in RAM").bank;
        let Gated { inputs: [gate, up], down } = &bank.experts;
        let of = [gate, up, down][matrix];
        let (first, last) = (of.part_of(places.start, bank.count).start, of.part_of(places.end - 1, bank.count).end);
        let tiles = &of.tiles().bytes()[first..last];
        assert_eq!(tiles.len(), out.len(), "bytes of experts {places:?}");
        let (len, out) = (out.len(), Shared::of(out));
        threads.pool().run(len.div_ceil(PIECE), 1, &|_, mine| {
            let part = mine.start * PIECE..(mine.end * PIECE).min(len);
            // SAFETY: the pool's ranges do not overlap.
            unsafe { out.slice(part.clone()) }.copy_from_slice(&tiles[part]);
        });
    }

    /// Biases of experts of layer `index`, one after another: of gate, up or down (`matrix` 0 to 2).
    ///
    /// # Panics
    /// If there are none at these places.
    #[must_use]
    pub fn biases(&self, index: usize, matrix: usize, places: Range<usize>) -> Option<&[f32]> {
        let bank = &self.layers[index].as_ref().expect("a layer with experts in RAM").bank;
        let all = &bank.biases.as_ref()?[matrix];
        let each = all.len() / bank.count;
        Some(&all[places.start * each..places.end * each])
    }

    /// A copy of an expert.
    ///
    /// # Panics
    /// If there is none at this place.
    #[must_use]
    pub fn expert(&self, index: usize, place: usize) -> Expert {
        let bank = &self.layers[index].as_ref().expect("a layer with experts in RAM").bank;
        let Gated { inputs: [gate, up], down } = &bank.experts;
        let tiles = [gate, up, down].map(|matrix| matrix.tiles().bytes()[matrix.part_of(place, bank.count)].to_vec());
        let of = |all: &Vec<f32>| all[all.len() / bank.count * place..][..all.len() / bank.count].to_vec();
        Expert { tiles, biases: bank.biases.as_ref().map(|biases| biases.each_ref().map(of)) }
    }

    /// Puts an expert of the same shape at the place of another.
    ///
    /// # Panics
    /// If there is none at this place, or the sizes differ.
    pub fn replace(&mut self, index: usize, place: usize, expert: &Expert) {
        let bank = &mut self.layers[index].as_mut().expect("a layer with experts in RAM").bank;
        let Gated { inputs: [gate, up], down } = &mut bank.experts;
        for (matrix, tiles) in [gate, up, down].into_iter().zip(&expert.tiles) {
            let part = matrix.part_of(place, bank.count);
            matrix.bytes_mut()[part].copy_from_slice(tiles);
        }
        for (all, bias) in bank.biases.iter_mut().flatten().zip(expert.biases.iter().flatten()) {
            let each = all.len() / bank.count;
            all[each * place..][..each].copy_from_slice(bias);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Architecture;
    use crate::weights::testing::TinyModel;

    fn options(file: &ModelFile, ram: u64) -> StageOptions {
        let layers = 0..file.config().layers;
        StageOptions { layers, sequences: 1, context: 8, activations: Activations::Int8, ram, threads: 2 }
    }

    #[test]
    fn few_layers_share_the_experts_in_ram_and_some_always_stay() {
        let model = TinyModel { experts: Some([8, 2]), layers: 3, ..TinyModel::of(Architecture::Qwen3Moe) };
        let file = model.open();
        let each = expert_bytes(&file, 0).unwrap();
        let counts = |ram| experts_in_ram(&file, &options(&file, ram)).map(|split| split.counts);
        assert_eq!(counts(0).unwrap(), [0, 0, 0]);
        assert_eq!(counts(1).unwrap(), [0, 0, 1]);
        assert_eq!(counts(4 * each).unwrap(), [0, 0, 4]);
        assert_eq!(counts(4 * each + 1).unwrap(), [0, 1, 4]);
        assert_eq!(counts(12 * each).unwrap(), [4, 4, 4]);
        assert_eq!(counts(13 * each).unwrap(), [3, 5, 5]);
        let most = movable_bytes(&file, &options(&file, 0)).unwrap();
        assert_eq!((most, counts(most).unwrap()), (18 * each, vec![6, 6, 6]));
        assert!(counts(most + 1).unwrap_err().to_string().contains("were to lie in RAM"));
        let dense = TinyModel::default().open();
        assert_eq!(movable_bytes(&dense, &options(&dense, 0)).unwrap(), 0);
        assert!(experts_in_ram(&dense, &options(&dense, 1)).is_err());
    }

    #[test]
    fn an_expert_has_the_same_outputs_at_another_place() {
        let model = TinyModel { experts: Some([4, 2]), layers: 1, ..TinyModel::of(Architecture::GptOss) };
        let (file, mut threads) = (model.open(), Threads::new(2).unwrap());
        let fill = |tensor: &TensorView<'_>, rows, tiles: &mut [u8]| Ok(tensor.read_tiles(rows, tiles)?);
        let load = |in_ram| RamExperts::load(&file, &options(&file, 0), &[in_ram], &fill).unwrap();
        let (mut two, mut one) = (load(2), load(1));
        let width = file.config().width;
        let rows: Vec<f32> = (0..3 * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 20.0).collect();
        let mut outputs = |experts: &mut RamExperts, pairs: &[[usize; 2]]| {
            let pair = |[row, place]: &[usize; 2]| Pair { row: *row, place: *place, weight: 1.0 };
            let pairs: Vec<Pair> = pairs.iter().map(pair).collect();
            let mut out = vec![0.0; pairs.len() * width];
            experts.compute(&mut threads, 0, &rows, &pairs, &mut out);
            out
        };
        let all = outputs(&mut two, &[[2, 1], [0, 0], [1, 1], [0, 1]]);
        assert_eq!(outputs(&mut one, &[[2, 0]]), all[..width], "the last expert, alone");
        let alone = outputs(&mut two, &[[0, 0]]);
        assert_eq!(alone, all[width..2 * width]);
        assert_ne!(alone, all[3 * width..], "experts differ");
        // The last two change places.
        let [first, last] = [0, 1].map(|place| two.expert(0, place));
        two.replace(0, 0, &last);
        two.replace(0, 1, &first);
        assert_eq!(outputs(&mut two, &[[2, 0], [0, 1], [1, 0], [0, 0]]), all);
    }
}
