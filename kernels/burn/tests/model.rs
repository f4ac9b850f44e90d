//! Compares the CPU engine with the oracle in plain burn operations, on burn's CPU backend or, with `MESHNODE_BACKEND=cuda`, on CUDA.
use std::sync::Arc;

use burn::backend::{Cuda, Flex};
use burn::tensor::backend::Backend;
use kernels::quant::QuantType;
use kernels::threads::Threads;
use kernels_models::load_cpu_stage;
use kernels_models::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut, StageOptions};
use kernels_models::weights::testing::TinyModel;
use kernels_models::weights::{Architecture, ModelFile};

/// Arbitrary tokens of the small vocabulary.
const TOKENS: [u32; 11] = [1, 77, 30, 200, 5, 5, 266, 131, 12, 99, 254];
/// Maximum error of the logits relative to the largest: both sides sum f32 in different orders.
const TOLERANCE: f32 = 1e-3;

/// The engine's logits after each token.
fn engine(file: &Arc<ModelFile>) -> Vec<Vec<f32>> {
    let layers = 0..file.config().layers;
    let options = StageOptions { layers, sequences: 1, context: 16, activations: Activations::F32, ram: 0, threads: 1 };
    let mut stage = load_cpu_stage(Arc::clone(file), options).unwrap();
    let step = |(position, token): (usize, &u32)| {
        let rows = Rows {
            sequence: 1,
            position,
            input: RowsIn::Tokens(std::slice::from_ref(token)),
            output: RequestedOutput::Logits,
        };
        match stage.forward(&mut Threads::new(1).unwrap(), &[rows]).unwrap().remove(0) {
            RowsOut::Logits(logits) => logits,
            RowsOut::Hidden(_)
            | RowsOut::Encoded(_)
            | RowsOut::Token(_)
            | RowsOut::Tokens(_)
            | RowsOut::Embedding(_)
            | RowsOut::Nothing => {
                panic!("expected logits")
            }
        }
    };
    TOKENS.iter().enumerate().map(step).collect()
}

fn compare<B: Backend>(device: &B::Device) {
    for architecture in Architecture::ALL {
        for (quant, tied, biases) in
            [(QuantType::Q4_1, true, false), (QuantType::Q4K, false, true), (QuantType::Q8_0, true, false)]
        {
            let file = TinyModel { quant, tied, biases, ..TinyModel::of(architecture) }.open();
            let expected = kernels_burn::model::logits::<B>(&file, &TOKENS, device);
            for (position, (found, expected)) in engine(&file).iter().zip(&expected).enumerate() {
                let size = expected.iter().fold(0f32, |size, x| size.max(x.abs()));
                let worst = found.iter().zip(expected).fold(0f32, |worst, (f, e)| worst.max((f - e).abs() / size));
                // This form also fails for NaN.
                assert!(worst <= TOLERANCE, "{architecture:?} {}, position {position}: {worst}", quant.name());
            }
        }
    }
}

#[test]
fn small_models_give_the_oracles_logits() {
    match std::env::var("MESHNODE_BACKEND").as_deref() {
        Ok("cuda") => compare::<Cuda>(&Default::default()),
        Ok(other) => panic!("MESHNODE_BACKEND is {other:?}: expected \"cuda\", or unset for the CPU"),
        Err(_) => compare::<Flex>(&Default::default()),
    }
}
