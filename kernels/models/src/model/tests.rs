//! All instruction sets give the same bits for a whole model.
use kernels::quant::QuantType;
use kernels::threads::Threads;

use super::*;
use crate::stage::{Activations, RequestedOutput, Rows, RowsIn, RowsOut};
use crate::weights::Architecture;
use crate::weights::testing::TinyModel;

#[test]
fn instruction_sets_agree_bit_for_bit() {
    for architecture in Architecture::ALL {
        let file = TinyModel { quant: QuantType::Q4_1, ..TinyModel::of(architecture) }.open();
        for activations in [Activations::Int8, Activations::F32] {
            let run = |isa| {
                let options = StageOptions {
                    layers: 0..file.config().layers,
                    sequences: 1,
                    context: 64,
                    activations,
                    ram: 0,
                    threads: 1,
                };
                let mut stage = CpuEngine::load(Arc::clone(&file), options, isa).unwrap();
                let tokens: Vec<u32> = (0..40).map(|i| i * 5 + 3).collect();
                let mut logits = Vec::new();
                for (position, tokens) in [(0, &tokens[..33]), (33, &tokens[33..34]), (34, &tokens[34..])] {
                    let rows =
                        Rows { sequence: 0, position, input: RowsIn::Tokens(tokens), output: RequestedOutput::Logits };
                    let Ok(Some(RowsOut::Logits(row))) =
                        stage.forward(&mut Threads::new(1).unwrap(), &[rows]).map(|mut out| out.pop())
                    else {
                        panic!("expected logits");
                    };
                    logits.extend(row.into_iter().map(f32::to_bits));
                }
                logits
            };
            let expected = run(Isa::detect());
            assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            for isa in Isa::all() {
                assert!(run(isa) == expected, "{architecture:?} {activations:?} {isa:?}");
            }
        }
    }
}
