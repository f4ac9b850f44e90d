//! Conversations whose turns share their cache, while stages and their standbys change.
use super::*;
use node_core::limits::PAGE_POSITIONS;
use node_core::work::serve::Request;

/// The next turn of a conversation: the previous one with its answer, and 40 new tokens.
fn next_turn(room: &mut Room, before: CallId, max_tokens: u32) -> CallId {
    let call = &room.work.calls[&before];
    let mut prompt = call.request.prompt.clone();
    prompt.extend(call.tokens.iter().map(|(_, _, token)| *token));
    let new = request(before.0, 40, max_tokens);
    prompt.extend(&new.prompt);
    room.work.submit(&mut room.world, Request { prompt, ..new })
}

/// A standby that joins after the last turn lacks what rests. It gets that before the next turn, so that a loss during the
/// turn costs no more than any other loss.
#[test]
fn a_new_standby_gets_what_rests() {
    for seed in 1..=5 {
        let what = format!("seed {seed}");
        let mut room = Room::serving(Options::lan(seed), 8);
        let mut turn = room.submit(seed, 1000, 20);
        settle(&mut room);
        assert!(room.work.run_until_done(&mut room.world, ms(20_000)), "{what}: the first turn ends");
        room.run_for(ms(5000)); // the caller reads the answer
        for lost in [1, 2] {
            let owner = room.work.stages(&room.world)[lost];
            room.strike(Fault::Crash(owner));
            room.run_for(ms(1000));
            settle(&mut room);
            room.run_for(ms(5000)); // the caller reads the answer
            let known = room.work.calls[&turn].request.prompt.len() as u32;
            turn = next_turn(&mut room, turn, 400);
            room.run_for(ms(2000));
            let owner = room.work.stages(&room.world)[lost];
            room.strike(Fault::Crash(owner));
            assert!(room.work.run_until_done(&mut room.world, ms(20_000)), "{what}: the turn ends");
            let pause = room.work.calls[&turn].longest_pause();
            assert!(pause <= ms(700), "{what}: {pause:?}");
            let cached = room.work.notes.iter().find_map(|notification| match notification.event {
                Event::Begun { call, cached } if call == turn => Some(cached),
                _ => None,
            });
            assert!(
                cached.is_some_and(|cached| cached >= known / PAGE_POSITIONS * PAGE_POSITIONS),
                "{what}: {cached:?}"
            );
            room.world.strike(Fault::Restart { host: owner, keep_disk: true });
        }
        room.check(&what).assert_all_finished(&what);
    }
}
