//! A model file that is truncated while it is served, and a model that computes NaN.
use super::*;
use kernels::quant::QuantType;

fn cut(path: &str, len: u64) {
    std::fs::File::options().write(true).open(path).and_then(|file| file.set_len(len)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_truncated_model_file_does_not_stop_serving_and_is_not_reloaded() {
    let bench = bench().await;
    let first = bench.serve(options(128)).await.unwrap();
    assert_eq!(end(bench.ask(&first, 5).await).await, (5, DoneReason::Length));
    let whole = std::fs::metadata(&bench.model.0).unwrap().len();
    cut(&bench.model.0, whole / 2);
    assert_eq!(end(bench.ask(&first, 20).await).await, (20, DoneReason::Length), "the weights are in memory");
    let error = bench.serve(options(256)).await.err().expect("cut").to_string();
    assert!(error.contains("truncated") && error.contains("tiny.gguf"), "{error}");
    let served = bench.node.served("tiny").expect("still served");
    assert_eq!((served.job, served.context), (first.job, 128));
    assert_eq!(end(bench.ask(&served, 3).await).await, (3, DoneReason::Length));
}

/// The model is sound for all tokens but one, whose embedding row is so large that its norm overflows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_nan_logits_fails_with_layers_and_position() {
    let bench = bench().await;
    let tiny = TinyModel { tied: false, ..TinyModel::default() };
    let prompt = tiny.open().tokenizer().unwrap().encode_prompt("hello world").unwrap();
    let (last, row_bytes) = (*prompt.last().unwrap() as usize, 4 * tiny.width);
    let numbers = TinyModel { quant: QuantType::F32, ..tiny }.writer().tensors_mut()[0].clone();
    let mut writer = tiny.writer();
    let table = &mut writer.tensors_mut()[0];
    (table.kind, table.bytes) = (numbers.kind, numbers.bytes);
    table.bytes[last * row_bytes..][..row_bytes].copy_from_slice(&1e30f32.to_le_bytes().repeat(tiny.width));
    std::fs::write(&bench.model.0, writer.write()).unwrap();

    let model = bench.serve(options(128)).await.expect("its other tokens are sound");
    let (tokens, reason) = end(bench.ask(&model, 5).await).await;
    let DoneReason::Failed(why) = reason else { panic!("{reason:?}") };
    let place = format!("layers 0-2, position {}: ", prompt.len() - 1);
    assert!(tokens == 0 && why.contains(&place), "{tokens} tokens, {why}");
}
