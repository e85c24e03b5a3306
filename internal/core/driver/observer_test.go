package driver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/status"
)

// slowAsker is a driver that is ready, and reports before its answer that it takes long.
type slowAsker struct {
	box
	slow bool
}

func (a slowAsker) Ask(_ context.Context, _ Why, progress func(status.Report)) status.Report {
	if a.slow {
		progress(status.Report{Driver: status.Starting, Reason: "it takes its time"})
	}
	return status.Report{Driver: status.Ready}
}

// TestFirstAnswer: the first answer to an Observer, which another timeout also begins, is a return
// of the driver only if it was seen not to be ready. The kubelet may have refused it meanwhile.
func TestFirstAnswer(t *testing.T) {
	for _, slow := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			o := Observe(slowAsker{make(box), slow})
			defer o.Close()
			o.Follow(true, true, 0)
			synctest.Wait()
			if v := o.Look(); v.Driver != status.Ready || v.ReturnedAt.IsZero() == slow {
				t.Errorf("slow %v: %s, returned at %s", slow, v.Driver, v.ReturnedAt)
			}
		})
	}
}

// probed counts the calls of Probe to a driver that is ready.
type probed struct {
	box
	probes *int
}

func (a probed) Ask(_ context.Context, why Why, _ func(status.Report)) status.Report {
	if why == Probing {
		*a.probes++
	}
	return status.Report{Driver: status.Ready}
}

// TestProbesEnd checks that Probe is called once each minute, and never after it was switched off,
// or the driver is not registered any more.
func TestProbesEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		probes := 0
		o := Observe(probed{make(box), &probes})
		defer o.Close()
		for _, ended := range []func(){
			func() { o.Follow(true, true, 0) }, func() { o.Follow(true, false, time.Minute) }, func() { o.Follow(false, true, time.Minute) },
		} {
			probes = 0
			o.Follow(true, true, time.Minute)
			time.Sleep(5*time.Minute + 30*time.Second)
			synctest.Wait()
			if probes < 4 || probes > 6 {
				t.Errorf("%d probes in 5 minutes", probes)
			}
			ended()
			probes = 0
			time.Sleep(time.Hour)
			synctest.Wait()
			if probes > 0 {
				t.Errorf("%d probes after their end", probes)
			}
		}
	})
}

// scripted is a driver whose answers the test sends. It keeps the Observer waiting for each.
type scripted struct {
	box
	answers chan func(progress func(status.Report)) status.Report
}

func (a scripted) Ask(ctx context.Context, _ Why, progress func(status.Report)) status.Report {
	select {
	case answer := <-a.answers:
		return answer(progress)
	case <-ctx.Done():
		return status.Report{}
	}
}

// TestSlowRestartsCount: a driver that accepts connections, and crashes before it has answered a
// call for a second, has restarted, however that call ends.
func TestSlowRestartsCount(t *testing.T) {
	for what, ends := range map[string]status.Report{
		"the connection broke": {Driver: status.Starting}, "its socket is gone": {Driver: status.Absent}, "its socket was replaced": {},
		"it answers": {Driver: status.Ready}, "it answers, with another socket": {Driver: status.Ready, Replaced: true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := scripted{make(box), make(chan func(func(status.Report)) status.Report)}
				o := Observe(a)
				defer o.Close()
				o.Follow(true, true, time.Minute)
				for restarts := range uint64(4) {
					a.answers <- func(progress func(status.Report)) status.Report {
						progress(status.Report{Driver: status.Starting})
						rep := ends // the first start replaces nothing
						rep.Replaced = rep.Replaced && restarts > 0
						return rep
					}
					a.answers <- func(func(status.Report)) status.Report { return status.Report{Driver: status.Absent} }
					synctest.Wait()
					if v := o.Look(); v.RestartsTotal != restarts || uint64(len(v.Restarts)) != restarts {
						t.Errorf("%d restarts, %d of them recent, want %d", v.RestartsTotal, len(v.Restarts), restarts)
					}
				}
			})
		})
	}
}
