//! HighwayHash with 128 bits (J. Alakuijala, B. Cox, J. Wassenberg, *Fast keyed hash/pseudo-random function using SIMD
//! multiply and permute*, 2016), in its portable form. Redisson names a value by this hash of its bytes.
//!
//! 1. The state is four vectors of four 64-bit lanes, initialized with constants and the key.
//! 2. Each packet of 32 bytes is added, multiplied and permuted into the state.
//! 3. A last, shorter packet is padded so that its length also counts.
//! 4. Six rounds without input mix the state; the hash is the sum of some of its lanes.

type Lanes = [u64; 4];

/// The key that all Redisson clients use.
const KEY: Lanes = [
    0x9e37_79b9_7f4a_7c15,
    0xf39c_c060_5ced_c834,
    0x1082_276b_f3a2_7251,
    0xf86c_6a11_d0c1_8e95,
];

const INITIAL: [Lanes; 2] = [
    [
        0xdbe6_d5d5_fe4c_ce2f,
        0xa409_3822_299f_31d0,
        0x1319_8a2e_0370_7344,
        0x243f_6a88_85a3_08d3,
    ],
    [
        0x3bd3_9e10_cb0e_f593,
        0xc0ac_f169_b5f1_8a8c,
        0xbe54_66cf_34e9_0c6c,
        0x4528_21e6_38d0_1377,
    ],
];

/// Number of bytes in a packet.
const PACKET: usize = 32;

/// Number of rounds after the last packet.
const FINAL_ROUNDS: usize = 6;

struct State {
    v0: Lanes,
    v1: Lanes,
    mul0: Lanes,
    mul1: Lanes,
}

/// Returns the hash in the order of Redisson: two numbers, each with its highest byte first.
pub(super) fn hash128(bytes: &[u8]) -> [u8; 16] {
    let mut state = State::new();
    let (packets, rest) = bytes.as_chunks::<PACKET>();
    packets.iter().for_each(|packet| state.update(packet));
    if !rest.is_empty() {
        state.update_with_rest(rest);
    }
    (0..FINAL_ROUNDS).for_each(|_| state.permute());
    let State { v0, v1, mul0, mul1 } = state;
    let sum = |i: usize| {
        let low = v0[i].wrapping_add(mul0[i]);
        low.wrapping_add(v1[i + 2]).wrapping_add(mul1[i + 2])
    };
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&sum(0).to_be_bytes());
    hash[8..].copy_from_slice(&sum(1).to_be_bytes());
    hash
}

impl State {
    fn new() -> State {
        let [mul0, mul1] = INITIAL;
        let mut state = State {
            v0: mul0,
            v1: mul1,
            mul0,
            mul1,
        };
        for (i, key) in KEY.into_iter().enumerate() {
            state.v0[i] ^= key;
            state.v1[i] ^= key.rotate_left(32);
        }
        state
    }

    fn update(&mut self, packet: &[u8; PACKET]) {
        let (lanes, _) = packet.as_chunks::<8>();
        let mut numbers = Lanes::default();
        for (number, lane) in numbers.iter_mut().zip(lanes) {
            *number = u64::from_le_bytes(*lane);
        }
        self.update_lanes(numbers);
    }

    fn update_lanes(&mut self, lanes: Lanes) {
        let State { v0, v1, mul0, mul1 } = self;
        let low = |number: u64| number & 0xffff_ffff;
        for i in 0..4 {
            v1[i] = v1[i].wrapping_add(mul0[i]).wrapping_add(lanes[i]);
            mul0[i] ^= low(v1[i]).wrapping_mul(v0[i] >> 32);
            v0[i] = v0[i].wrapping_add(mul1[i]);
            mul1[i] ^= low(v0[i]).wrapping_mul(v1[i] >> 32);
        }
        add_zipped(v0, v1);
        add_zipped(v1, v0);
    }

    /// Adds the last bytes, fewer than a packet. The packet begins with all complete groups of four bytes.
    fn update_with_rest(&mut self, rest: &[u8]) {
        let len = rest.len();
        let count = len as u64;
        for lane in &mut self.v0 {
            *lane = lane.wrapping_add((count << 32) + count);
        }
        for lane in &mut self.v1 {
            let (high, low) = ((*lane >> 32) as u32, *lane as u32);
            let rotated = |half: u32| u64::from(half.rotate_left(len as u32));
            *lane = rotated(high) << 32 | rotated(low);
        }
        let mut packet = [0; PACKET];
        let groups = len / 4 * 4;
        packet[..groups].copy_from_slice(&rest[..groups]);
        let last = &rest[groups..];
        if len >= 16 {
            packet[28..].copy_from_slice(&rest[len - 4..]);
        } else if let (Some(&first), Some(&end)) = (last.first(), last.last()) {
            packet[16] = first;
            packet[17] = last[last.len() / 2];
            packet[18] = end;
        }
        self.update(&packet);
    }

    fn permute(&mut self) {
        let half = |i: usize| self.v0[i].rotate_left(32);
        self.update_lanes([half(2), half(3), half(0), half(1)]);
    }
}

/// Adds the bytes of `from` to `to`, in another order within each pair of lanes.
fn add_zipped(to: &mut Lanes, from: &Lanes) {
    for low in [0, 2] {
        let (even, odd) = (from[low].to_le_bytes(), from[low + 1].to_le_bytes());
        let zipped = |bytes| u64::from_le_bytes(bytes);
        let to_even = [
            even[3], odd[4], even[2], even[5], odd[6], even[1], odd[7], even[0],
        ];
        let to_odd = [
            odd[3], even[4], odd[2], odd[5], odd[1], even[6], odd[0], even[7],
        ];
        to[low] = to[low].wrapping_add(zipped(to_even));
        to[low + 1] = to[low + 1].wrapping_add(zipped(to_odd));
    }
}
