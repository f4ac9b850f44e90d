//! The share of time in which stages wait for each other's tokens while requests decode.
use super::*;

/// The largest share allowed for eight requests on four equal stages.
const BUBBLE_MAX: f64 = 0.15;
const REQUESTS: u64 = 8;
const STAGES: usize = 4;

#[test]
fn eight_requests_keep_four_stages_busy() {
    let (mut world, _) = Room::empty(Options::lan(1), 2 * STAGES, &with_memory(HOST_MEMORY * 3 / 5));
    let model = symbolic_model(LAYERS, LAYER_BYTES);
    let mut work = Workload::deploy(&mut world, COORDINATOR, model);
    assert!(work.run_until_ready(&mut world, ms(20_000)), "{:?}", work.notes);
    let owners = work.stages(&world);
    assert_eq!(owners.len(), STAGES, "{owners:?}");
    for n in 0..REQUESTS {
        work.submit(&mut world, request(n, 16, 400));
    }
    // All of them decode, and none ends.
    work.run(&mut world, ms(2_000), |_, _| false);
    assert!(work.calls.values().all(|call| !call.tokens.is_empty() && call.ends.is_empty()), "they decode");
    let took = |world: &World| owners.iter().map(|host| world.host(*host).executor.batches_took).collect::<Vec<_>>();
    let (before, begin) = (took(&world), world.now());
    let tokens = |work: &Workload| work.calls.values().map(|call| call.tokens.len()).sum::<usize>();
    let tokens_before = tokens(&work);
    work.run(&mut world, ms(1_000), |_, _| false);
    assert!(work.calls.values().all(|call| call.ends.is_empty()), "none ends");
    let time = (world.now().since(begin)).as_secs_f64();
    let busy: Vec<f64> =
        took(&world).iter().zip(&before).map(|(now, before)| (*now - *before).as_secs_f64() / time).collect();
    let bubble = 1.0 - busy.iter().sum::<f64>() / STAGES as f64;
    println!(
        "bubble {bubble:.3}; stages are busy {busy:.3?}; {:.0} tokens/s",
        (tokens(&work) - tokens_before) as f64 / time
    );
    assert!(bubble <= BUBBLE_MAX, "bubble {bubble:.3}: stages are busy {busy:.3?}");
}
