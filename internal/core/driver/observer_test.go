package driver

import (
	"context"
	"testing"
	"testing/synctest"

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
