//! How long streams wait beside a prompt, and the prompt beside them, on slow devices.
use super::*;
use node_core::time::Instant;

/// Rows of the prompt.
const ROWS: u32 = 4000;
/// With these, a pass over a layer takes 5 ms, and a row of a prompt from 0.5 ms at its beginning to 4.6 ms at its end.
const BYTES_PER_SECOND: u64 = 4_000_000_000;
const CACHE_BYTES_PER_SECOND: u64 = 1_000_000_000;

/// The usual step of a stream alone; its gaps while a prompt is computed, sorted; the times to the first token of the prompt,
/// beside the streams and alone.
struct Measured {
    step: Duration,
    gaps: Vec<Duration>,
    prompt: Duration,
    alone: Duration,
}

fn measure(stages: u32, streams: u64) -> Measured {
    let mut spec = with_memory(80 << 20);
    let device = &mut spec.capacity.devices[0];
    (device.bytes_per_second, device.cache_bytes_per_second) = (BYTES_PER_SECOND, CACHE_BYTES_PER_SECOND);
    let (mut world, _) = Room::empty(Options::lan(7), stages as usize, &spec);
    let mut work = Workload::deploy(&mut world, COORDINATOR, symbolic_model(stages, LAYER_BYTES));
    assert!(work.run_until_ready(&mut world, ms(20_000)), "{:?}", work.notes);
    assert_eq!(work.stages(&world).len(), stages as usize);
    let first = |work: &Workload, call: CallId| {
        let call = &work.calls[&call];
        call.tokens.first().expect("a token").0.since(call.submitted)
    };
    let alone = work.submit(&mut world, request(1, ROWS, 1));
    assert!(work.run_until_done(&mut world, ms(60_000)));
    let streams: Vec<CallId> = (0..streams).map(|n| work.submit(&mut world, request(20 + n, 16, 1900))).collect();
    work.run(&mut world, ms(3_000), |_, _| false);
    let begin = world.now();
    let prompt = work.submit(&mut world, request(3, ROWS, 1));
    let done = work.run(&mut world, ms(60_000), |work, _| !work.calls[&prompt].ends.is_empty());
    let end = world.now();
    assert!(done && work.run_until_done(&mut world, ms(60_000)), "everything ends");
    let wrong = requests::violations(&work);
    assert!(wrong.is_empty(), "{wrong:?}");
    let gaps = |from: Instant, until: Instant| {
        let times: Vec<Instant> = work.calls[&streams[0]].tokens.iter().map(|(at, ..)| *at).collect();
        let within = times.windows(2).filter(|pair| pair[1] > from && pair[0] < until);
        let mut gaps: Vec<Duration> = within.map(|pair| pair[1].since(pair[0])).collect();
        gaps.sort();
        gaps
    };
    let steps = gaps(Instant(0), begin);
    let (prompt, alone) = (first(&work, prompt), first(&work, alone));
    Measured { step: steps[steps.len() / 2], gaps: gaps(begin, end), prompt, alone }
}

#[test]
fn streams_and_prompts_share_slow_stages() {
    for (stages, streams) in [(1, 1), (2, 1), (2, 8), (4, 1)] {
        let Measured { step, gaps, prompt, alone } = measure(stages, streams);
        let at = |percent: usize| gaps[(gaps.len() - 1) * percent / 100];
        println!(
            "{stages} stages, {streams} streams: steps of {step:?}; beside a prompt {:?} in the median, {:?} of 95 %, at most {:?}; \
             the prompt takes {prompt:?}, {alone:?} alone",
            at(50),
            at(95),
            at(100)
        );
        if stages <= 2 {
            assert!(
                at(95) <= step * 2 + ms(50),
                "{stages} stages, {streams} streams: 95 % of gaps within {:?}",
                at(95)
            );
        }
        assert!(prompt <= alone * 3 / 2, "{stages} stages, {streams} streams: {prompt:?}, {alone:?} alone");
    }
}
