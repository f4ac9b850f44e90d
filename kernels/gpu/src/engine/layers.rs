//! Loads the weights of layers onto a device.
use cubecl::server::Handle;
use kernels_models::recipe::LayerRecipe;
use kernels_models::rotary::RotaryTable;
use kernels_models::stage::StageError;
use kernels_models::weights::HeadNorms;

use super::memory::Memory;
use super::{FeedForward, Layer};
use crate::attention::Pages;
use crate::load::Loader;
use crate::platform::Platform;

pub(super) fn layer<R: Platform>(
    loader: &mut Loader<'_, R>,
    recipe: &LayerRecipe,
    index: usize,
    in_ram: usize,
    pages: Pages,
    rotary: Handle,
    head_dim: usize,
) -> Result<Layer, StageError> {
    let weight = |part: &str| format!("blk.{index}.{part}.weight");
    let bias = |part: &str| format!("blk.{index}.{part}.bias");
    let inputs = ["attn_q", "attn_k", "attn_v"];
    let two = |loader: &mut Loader<'_, R>, parts: [&str; 2]| -> Result<[Handle; 2], StageError> {
        Ok([loader.vector(&weight(parts[0]))?, loader.vector(&weight(parts[1]))?])
    };
    Ok(Layer {
        attention_norm: loader.vector(&weight("attn_norm"))?,
        inputs: loader.matrices(&inputs.map(weight))?,
        biases: recipe.biases.then(|| loader.vectors(&inputs.map(bias))).transpose()?,
        head_norms: match recipe.head_norms {
            None => None,
            Some(HeadNorms::Weighted) => Some(loader.vectors(&["attn_q_norm", "attn_k_norm"].map(weight))?),
            Some(HeadNorms::Plain) => Some(loader.ones(2 * head_dim)?),
        },
        sinks: recipe.sinks.then(|| loader.vector(&weight("attn_sinks"))).transpose()?,
        output: loader.matrices(&[weight("attn_output")])?,
        output_bias: recipe.output_bias.then(|| loader.vector(&bias("attn_output"))).transpose()?,
        norms_after: recipe.norms_after.then(|| two(loader, ["post_attention_norm", "post_ffw_norm"])).transpose()?,
        ffn_norm: loader.vector(&format!("blk.{index}.{}", recipe.ffn_norm))?,
        feed_forward: FeedForward::load(loader, recipe, index, in_ram)?,
        pages,
        rotary,
    })
}

/// Uploads the cosines, then the sines, then the factor of queries of each position below `positions`, which the table must cover.
pub(super) fn rotary<R: Platform>(
    memory: &Memory<'_, R>,
    table: &RotaryTable,
    positions: usize,
) -> Result<Handle, StageError> {
    let row = |position| {
        let (cosines, sines) = table.at(position);
        cosines.iter().chain(sines).copied().chain([table.query_factor(position)])
    };
    let numbers: Vec<f32> = (0..positions).flat_map(row).collect();
    memory.created(bytemuck::cast_slice(&numbers).to_vec(), "rotary tables")
}
