package chaos

import "testing"

// A failed seed can be replayed only if the plan depends on nothing else.
func TestPlanIsTheSeeds(t *testing.T) {
	a, b, other := NewPlan(7, 20), NewPlan(7, 20), NewPlan(8, 20)
	same := 0
	var last Step
	for range 5000 {
		s := a.Next()
		if o := b.Next(); s != o {
			t.Fatalf("the same seed decided %v and %v", s, o)
		}
		if o := other.Next(); s.Act == o.Act && s.Driver == o.Driver {
			same++
		}
		if s.At < last.At || s.N != last.N+1 {
			t.Fatalf("%v came after %v", s, last)
		}
		last = s
	}
	if same > 1000 {
		t.Errorf("two seeds decided the same %d times of 5000", same)
	}
}

// Every action of a plan must be implemented.
func TestPlanNamesActions(t *testing.T) {
	for _, c := range choices {
		for _, act := range []string{c.act, c.then} {
			if act != "" && actions[act] == nil {
				t.Errorf("nobody can do %q", act)
			}
		}
	}
}
