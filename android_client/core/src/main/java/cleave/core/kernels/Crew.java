package cleave.core.kernels;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.atomic.AtomicInteger;

/** Threads that share out pieces of work; a fast core takes more of them than a slow one. */
final class Crew {
    /** One piece of work. */
    interface Piece {
        /** @param member whose room to work in, from 0 */
        void run(int member, int piece);
    }

    /** How many threads work, the caller's included. */
    final int size;

    private final ExecutorService helpers;

    /** @param threads makes the threads; what they run as is the owner's choice */
    Crew(int size, ThreadFactory threads) {
        this.size = size;
        helpers = size > 1 ? Executors.newFixedThreadPool(size - 1, threads) : null;
    }

    /**
     * Do so many pieces of work; returns when all are done.
     *
     * @param members how many threads may work on it
     * @throws RuntimeException or Error what a piece threw
     */
    void work(int pieces, int members, Piece piece) {
        AtomicInteger next = new AtomicInteger();
        List<Future<?>> helping = new ArrayList<>();
        for (int member = 1; member < Math.min(members, Math.min(size, pieces)); member++) {
            int self = member;
            helping.add(helpers.submit(() -> take(self, pieces, next, piece)));
        }
        try {
            take(0, pieces, next, piece);
        } finally {
            next.set(pieces); // if this thread failed, the others need not go on
            finish(helping);
        }
    }

    void close() {
        if (helpers != null) {
            helpers.shutdownNow();
        }
    }

    private static void take(int member, int pieces, AtomicInteger next, Piece piece) {
        for (int i = next.getAndIncrement(); i < pieces; i = next.getAndIncrement()) {
            piece.run(member, i);
        }
    }

    /** Waits for all, whatever happens: they write to what the caller owns. */
    private static void finish(List<Future<?>> helping) {
        boolean interrupted = false;
        Throwable failed = null;
        for (Future<?> helper : helping) {
            while (true) {
                try {
                    helper.get();
                    break;
                } catch (InterruptedException error) {
                    interrupted = true;
                } catch (ExecutionException error) {
                    failed = error.getCause();
                    break;
                }
            }
        }
        if (interrupted) {
            Thread.currentThread().interrupt();
        }
        if (failed != null) {
            throw new IllegalStateException("a thread that multiplies failed: " + failed, failed);
        }
    }
}
